"""Read sources into Arrow tables in memory, and count malformed rows and dropped rows."""

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem
from raoe_train.data.files import text_lines
from raoe_train.data.sources import columns_for, existing_file, is_file, open_source

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)
BATCH = 4096  # number of rows to hold as Python objects at a time
Parse = Callable[[dict[str, Any]], Any]  # row -> what was read from it, or RowProblem
# (columns of rows, their source) -> how to parse these rows. RowProblem if none can be used.
Make = Callable[[Collection[str], "Source"], Parse]
Reader = Callable[[str, Any], Any]  # (column, value) -> parsed value, or RowProblem
Counts = dict[str, Any]
"""{"read": rows in the selected splits, "kept": rows, "dropped": {reason: rows}, all as numbers;
"unread": names of columns that were not read, if any}. read = kept + sum of dropped."""
Table = tuple["Dataset", Counts]


class Source:
    """A source of rows, which can be read once, and the numbers of dropped rows by reason."""

    def __init__(self, source: Any, mapping: Any = None, on_error: str = "raise") -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        self.columns = columns_for(source, mapping)
        self.rows = source if isinstance(source, Iterator) else open_source(source, mapping)
        is_name = isinstance(source, (str, os.PathLike))
        self.name = str(source) if is_name else type(source).__name__
        self.on_error, self.dropped, self._examples = on_error, Counter[str](), list[str]()
        self.where, self.number = "", 0  # of the current row

    def parse(self, make: Make) -> Iterator[Any]:
        """Yield what was read from each usable row. `make` is called when the columns change.
        ValueError, with file and line, for a malformed row unless on_error is "skip"."""
        present, parse = None, None
        for where, number, row in self.rows:
            self.where, self.number = where, number
            try:
                if isinstance(row, RowProblem):
                    raise row
                if parse is None or row.keys() != present:
                    present, parse = row.keys(), None
                    parse = make(present, self)
                result = parse(row)
            except RowProblem as problem:
                self._drop(f"{where} {number}: {problem}", problem)
            except ValueError as error:
                raise ValueError(f"{where} {number}: {error}") from None
            else:
                yield result

    def _drop(self, message: str, problem: RowProblem) -> None:
        if problem.malformed and self.on_error == "raise":
            raise ValueError(message) from None
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


def by_column(found: Mapping[str, str], readers: Mapping[str, Reader]) -> Parse:
    """Return a function that parses the columns of a row that were found, each with its reader."""
    plan = [(name, found[name], read) for name, read in readers.items() if name in found]
    return lambda row: {name: read(column, row[column]) for name, column, read in plan}


def read_table(source: Any, make: Make, noun: str, *, columns: Any = None, on_error: str = "raise") -> Table:
    """Parse the rows of a source. Return (table, counts). `noun` is the word for a row in messages,
    such as "pair". `columns` and `on_error`: see read_pairs."""
    opened = Source(source, columns, on_error)
    table = to_table(opened.parse(make))
    counts = opened.counts(len(table), noun)
    if dropped := counts["dropped"]:
        rows, read = sum(dropped.values()), counts["read"]
        logger.warning("%s: %d of %d rows left out: %s", opened.name, rows, read, dropped)
    return table, counts


def to_table(rows: Iterable[dict[str, Any]], types: Mapping[str, str] | None = None) -> "Dataset":
    """Convert rows with the same columns to a table in memory. `types` is {column: name of a
    pyarrow type}. Without `types`, the first BATCH values of a column determine its type."""
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint
    from datasets.table import InMemoryTable

    rows, batches, schema = iter(rows), [], pyarrow.schema(types or {})
    while part := list(itertools.islice(rows, BATCH)):
        columns = {name: [row[name] for row in part] for name in part[0]}
        batches.append(pyarrow.RecordBatch.from_pydict(columns, schema or None))
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
    opened = Source(source, columns)
    is_text = is_file(source) and source.lower().removesuffix(".gz").endswith(".txt")
    if is_text and "sentence" not in (columns or {}):
        lines, problem = text_lines(existing_file(source)), RowProblem("not UTF-8")
        opened.rows = (
            (f"{source}, line", number, problem if line is None else {"text": line}) for number, line in lines
        )
    present, column = None, ""
    for where, number, row in opened.rows:
        place = f"{where} {number}"
        if isinstance(row, RowProblem):
            yield place, row
            continue
        if row.keys() != present:
            try:
                column = opened.columns.find(row, ("sentence",))["sentence"]
            except RowProblem as error:
                raise ValueError(f"{place}: {error}") from None
            present = row.keys()
        text = row[column]
        yield place, text if isinstance(text, str) else RowProblem(f"{column} is {text!r}, not a string")
