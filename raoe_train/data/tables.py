"""Read the rows of sources into Arrow tables in memory, and count malformed rows and dropped rows."""

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from raoe_train.data.columns import Columns, RowProblem
from raoe_train.data.files import existing_file, text_lines
from raoe_train.data.sources import Source, is_file, open_source

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

BATCH = 4096  # number of rows to hold as Python objects at a time
Parsed = TypeVar("Parsed")
# Parse: (fields of a row, its source) -> parsed row. Reader: (column, value) -> parsed value. Errors: RowProblem.
Parse = Callable[[dict[str, Any], Source], Parsed]
Reader = Callable[[str, Any], Any]
Counts = dict[str, Any]
"""{"read": rows in the selected splits, "kept": rows, "dropped": {reason: rows}, all as numbers; "unread": names of
columns that were not read, if there are any}. read = kept + sum of dropped."""
Table = tuple["Dataset", Counts]


class Tally:
    """Counts the dropped rows of a source by reason. Messages show the first three dropped rows."""

    def __init__(self, on_error: str) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        self.on_error, self.dropped, self._examples = on_error, Counter[str](), list[str]()

    def parse_rows(self, source: Source, parse: Parse[Parsed]) -> Iterator[Parsed]:
        """Yield each parsed row. ValueError, with file and line, for a malformed row unless on_error is "skip"."""
        for line, row in source.rows:
            source.line = line
            try:
                if isinstance(row, RowProblem):
                    raise row
                result = parse(row, source)
            except RowProblem as problem:
                message = f"{source.place()}: {problem}"
                if problem.malformed and self.on_error == "raise":
                    raise ValueError(message) from None
                self.dropped[problem.reason] += 1
                if len(self._examples) < 3:
                    self._examples.append(f"\n  {message}")
            except ValueError as error:
                raise ValueError(f"{source.place()}: {error}") from None
            else:
                yield result

    def counts(self, source: Source, count: int, noun: str, advice: str = "") -> Counts:
        """Return the counts of a source after reading it. ValueError with `advice` if no row was kept."""
        dropped = {reason: rows for reason, rows in self.dropped.items() if rows}
        read = count + self.dropped.total()
        if not count:
            reasons = ", ".join(f"{rows} x {reason}" for reason, rows in dropped.items()) or "there are no rows"
            reasons += advice + "".join(self._examples)
            raise ValueError(f"{source.name}: no usable {noun} in {read} rows: {reasons}")
        unread = source.columns.unread()
        return {"read": read, "kept": count, "dropped": dropped, **({"unread": unread} if unread else {})}


def by_column(readers: Mapping[str, Reader], require: Sequence[str] | None = None) -> Parse:
    """Create a function that parses a row to {raoe's column: value}. Columns in `require` (None: all) must exist."""
    required = tuple(readers if require is None else require)

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        names = source.columns.find(fields, required, readers)
        return {name: read(names[name], fields[names[name]]) for name, read in readers.items() if name in names}

    return parse


def read_table(
    source: str | os.PathLike[str],
    parse: Parse[dict[str, Any]],
    noun: str,
    *,
    columns: Mapping[str, str | None] | None = None,
    on_error: str = "raise",
) -> Table:
    """Parse the rows of a source. Return (table, counts). `noun` is the word for a row in messages, such as "pair"."""
    stream, tally = open_source(source, columns), Tally(on_error)
    table = to_table(tally.parse_rows(stream, parse))
    counts = tally.counts(stream, len(table), noun)
    if left_out := tally.dropped.total():
        logger.warning("%s: %d of %d rows left out: %s", stream.name, left_out, counts["read"], counts["dropped"])
    return table, counts


def to_table(rows: Iterable[Mapping[str, Any]], types: Mapping[str, str] | None = None) -> "Dataset":
    """Convert rows with the same columns to a table in memory. `types` is {column: name of a pyarrow type}. Without
    `types`, the first BATCH values of a column determine its type."""
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint
    from datasets.table import InMemoryTable

    iterator, batches, schema = iter(rows), [], types and pyarrow.schema(types)
    while part := list(itertools.islice(iterator, BATCH)):
        batches.append(pyarrow.RecordBatch.from_pydict({name: [row[name] for row in part] for name in part[0]}, schema))
        schema = batches[0].schema
    table = InMemoryTable(pyarrow.Table.from_batches(batches or [pyarrow.RecordBatch.from_pydict({})]))
    return Dataset(table, fingerprint=generate_random_fingerprint())  # by default, datasets copies and hashes the table


class Texts:
    """All sentences in datasets whose columns hold texts or lists of texts. Can be iterated several times."""

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
    """Read the sentences of a source in order. Blank lines of a .txt file are kept, so that row i is line i + 1."""
    sentences = []
    for place, sentence in each_sentence(source, columns):
        if isinstance(sentence, RowProblem):
            raise ValueError(f"{place}: {sentence}")
        sentences.append(sentence)
    if not sentences:
        raise ValueError(f"{source} has no sentences")
    return sentences


def each_sentence(source: str, columns: Mapping[str, Any] | None = None) -> Iterator[tuple[str, str | RowProblem]]:
    """Yield (place, sentence) for each row of a source, or (place, problem) for a malformed row."""
    is_text = is_file(source) and source.lower().removesuffix(".gz").endswith(".txt")
    if is_text and "sentence" not in (columns or {}):
        lines = text_lines(existing_file(source))
        rows = ((number, RowProblem("not UTF-8") if line is None else {"text": line}) for number, line in lines)
        stream = Source(source, "line", Columns(), rows)
    else:
        stream = open_source(source, columns)
    for line, fields in stream.rows:
        stream.line = line
        if isinstance(fields, RowProblem):
            yield stream.place(), fields
            continue
        try:
            column = stream.columns.find(fields, ("sentence",))["sentence"]
        except RowProblem as error:
            raise ValueError(f"{stream.place()}: {error}") from None
        text = fields[column]
        yield stream.place(), text if isinstance(text, str) else RowProblem(f"{column} is {text!r}, not a string")
