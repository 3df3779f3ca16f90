"""Read sources into Arrow tables in memory, and count malformed rows and dropped rows."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import Block, Columns, RowProblem, blocks_of
from raoe_train.data.files import text_lines
from raoe_train.data.sources import columns_for, existing_file, is_file, open_source

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)
BATCH = 4096  # number of rows to hold as Python objects at a time
Values = dict[str, Any]  # {column: the value of each row}
Parse = Callable[[Block, Columns], Values]  # RowProblem if no row of the block can be used
Reader = Callable[[str, Any], Any]  # (column, value) -> parsed value, or RowProblem
Counts = dict[str, Any]
"""{"read": rows in the selected splits, "kept": rows, "dropped": {reason: rows}, all as numbers;
"unread": names of columns that were not read, if any}. read = kept + sum of dropped."""
Table = tuple["Dataset", Counts]


class Reading:
    """Reads a source, or an iterator of blocks, and counts the dropped rows by reason."""

    def __init__(self, source: Any, mapping: Any = None, on_error: str = "raise") -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        self.columns = columns_for(source, mapping)
        self.blocks = source if isinstance(source, Iterator) else open_source(source, mapping)
        is_name = isinstance(source, (str, os.PathLike))
        self.name = str(source) if is_name else type(source).__name__
        self.on_error, self.dropped, self._examples = on_error, Counter[str](), list[str]()

    def parts(self, parse: Parse) -> Iterator[Values]:
        """Yield parsed columns of at least BATCH usable rows, at the end fewer. ValueError, with
        file and line, for a malformed row unless on_error is "skip"."""
        part: Values = {}
        for block in self.blocks:
            values: Values = {}
            try:
                values = parse(block, self.columns) if block.usable() else {}
            except RowProblem as problem:
                for index in block.usable():
                    block.rows[index] = problem
            for index, row in enumerate(block.rows):
                if isinstance(row, RowProblem):
                    self._drop(block.place(index), row)
            if usable := block.usable():
                for name, column in values.items():
                    part.setdefault(name, []).extend([column[index] for index in usable])
                if len(part[name]) >= BATCH:
                    yield part
                    part = {}
        if part:
            yield part

    def _drop(self, place: str, problem: RowProblem) -> None:
        message = f"{place}: {problem}"
        if problem.malformed and self.on_error == "raise":
            raise ValueError(message)
        self.dropped[problem.reason] += 1
        if len(self._examples) < 3:
            self._examples.append(f"\n  {message}")

    def counts(self, kept: int, noun: str, advice: str = "") -> Counts:
        """Return the counts after reading. ValueError with `advice` if no row was kept."""
        dropped = {reason: rows for reason, rows in self.dropped.items() if rows}
        counts = {"read": kept + sum(dropped.values()), "kept": kept, "dropped": dropped}
        if not kept:
            reasons = ", ".join(f"{rows} x {reason}" for reason, rows in dropped.items())
            reasons = (reasons or "there are no rows") + advice + "".join(self._examples)
            raise ValueError(f"{self.name}: no usable {noun} in {counts['read']} rows: {reasons}")
        unread = self.columns.unread()
        return counts | ({"unread": unread} if unread else {})


def read_columns(block: Block, found: Mapping[str, str], readers: Mapping[str, Reader]) -> Values:
    """Parse the columns of a block that were found, with the reader of each column."""
    return {name: block.read(found[name], read) for name, read in readers.items() if name in found}


def read_table(
    source: Any, parse: Parse, noun: str, *, columns: Any = None, on_error: str = "raise"
) -> Table:
    """Parse the rows of a source. Return (table, counts). `noun` is the word for a row in messages,
    such as "pair". `columns` and `on_error`: see read_pairs."""
    reading = Reading(source, columns, on_error)
    table = to_table(reading.parts(parse))
    counts = reading.counts(len(table), noun)
    if dropped := counts["dropped"]:
        rows, read = sum(dropped.values()), counts["read"]
        logger.warning("%s: %d of %d rows left out: %s", reading.name, rows, read, dropped)
    return table, counts


def to_table(parts: Iterable[Values], types: Mapping[str, str] | None = None) -> "Dataset":
    """Convert parts with the same columns to a table in memory. `types` is {column: name of a
    pyarrow type}. Without `types`, the values of the first part determine the types."""
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint
    from datasets.table import InMemoryTable

    batches, schema = [], pyarrow.schema(types or {})
    for part in parts:
        batches.append(pyarrow.RecordBatch.from_pydict(part, schema or None))
        schema = batches[0].schema
    table = InMemoryTable(pyarrow.Table.from_batches(batches, schema))
    # by default, datasets copies and hashes the table
    return Dataset(table, fingerprint=generate_random_fingerprint())


class Texts:
    """All sentences in datasets whose columns hold texts or lists of texts, any number of times."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = dict(datasets)

    def __iter__(self) -> Iterator[str]:
        for dataset in self.datasets.values():
            for name in dataset.column_names:
                if name not in ("score", "label"):
                    for table in dataset.select_columns([name]).with_format("arrow").iter(BATCH):
                        for value in table[name].to_pylist():
                            yield from [value] if isinstance(value, str) else value or ()


def read_sentences(source: str, columns: Mapping[str, Any] | None = None) -> list[str]:
    """Read the sentences of a source in order. Blank lines of a .txt file are kept, so that row i
    is line i + 1."""
    sentences = []
    for place, sentence in each_sentence(source, columns):
        if isinstance(sentence, RowProblem):
            raise ValueError(f"{place}: {sentence}")
        sentences.append(sentence)
    if not sentences:
        raise ValueError(f"{source} has no sentences")
    return sentences


def each_sentence(source: str, columns: Any = None) -> Iterator[tuple[str, str | RowProblem]]:
    """Yield (place, sentence) for each row of a source, or (place, problem) for a malformed row."""
    reading = Reading(source, columns)
    is_text = is_file(source) and source.lower().removesuffix(".gz").endswith(".txt")
    if is_text and "sentence" not in (columns or {}):
        lines, problem = text_lines(existing_file(source)), RowProblem("not UTF-8")
        rows = ((n, problem if line is None else {"text": line}) for n, line in lines)
        reading = Reading(blocks_of(source, "line", rows))
    for block in reading.blocks:
        texts: list[Any] = block.rows
        if usable := block.usable():
            try:
                column = reading.columns.find(block.columns, ("sentence",))["sentence"]
            except RowProblem as error:
                raise ValueError(f"{block.place(usable[0])}: {error}") from None
            texts = block.read(column, _text)
        for index, row in enumerate(block.rows):
            yield block.place(index), row if isinstance(row, RowProblem) else texts[index]


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowProblem(f"{column} is {value!r}, not a string")
    return value
