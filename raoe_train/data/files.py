"""Read and write files of rows: TSV, CSV and JSONL, each also as .gz, and parquet.

TSV files (also .txt, as SNLI and SICK are published) are read without quoting: `"` is an ordinary
character. pyarrow and pandas would end rows at a carriage return, and accept unbalanced quotes.
"""

import csv
import gzip
import io
import itertools
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, cast

from raoe_train.data.columns import RowProblem
from raoe_train.outputs import replacing

KINDS = {f".{kind}": kind for kind in ("tsv", "csv", "jsonl", "parquet")}
KINDS |= {".txt": "tsv", ".ndjson": "jsonl"}
BATCH = 1024  # maximum number of rows of a block
LONGEST_CELL = 2**31 - 1  # of a CSV file; TSV and JSON have no limit
QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')  # a cell as CSV quotes it, with a quote inside
logger = logging.getLogger(__name__)


@dataclass
class Block:
    """Consecutive rows of a source with the same columns."""

    name: str  # of the source, for messages
    unit: str  # unit of the row numbers: "line" (where a row starts) or "row"
    numbers: Sequence[int]  # [n], from 1
    cells: dict[str, Any]  # {column: n values}
    problems: dict[int, RowProblem] = field(default_factory=dict)  # {index of an unusable row: why}

    def place(self, index: int) -> str:
        """Return the location of a row, for messages."""
        return f"{self.name}, {self.unit} {self.numbers[index]}"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row as {column: value}."""
        rows = zip(*self.cells.values(), strict=True) if self.cells else [()] * len(self.numbers)
        return (dict(zip(self.cells, row, strict=True)) for row in rows)

    def read(self, column: str, parse: Callable[[str, Any], Any]) -> list[Any]:
        """Parse each value of a column with `parse(column, value)`. See `each`."""
        return self.each(self.cells[column], partial(parse, column))

    def each(self, values: Iterable[Any], parse: Callable[[Any], Any]) -> list[Any]:
        """Return the parsed value of each row, None for an unusable row. If `parse` raises RowProblem,
        the row becomes unusable."""
        results = []
        for index, value in enumerate(values):
            try:
                results.append(None if index in self.problems else parse(value))
            except RowProblem as problem:
                self.problems[index] = problem
                results.append(None)
            except ValueError as error:
                raise ValueError(f"{self.place(index)}: {error}") from None
        return results

    def usable(self) -> list[int]:
        """Return the indices of the rows without a problem."""
        return [index for index in range(len(self.numbers)) if index not in self.problems]

    def select(self, rows: Sequence[int]) -> "Block":
        """Return a block with the rows at these indices."""
        problems = {new: self.problems[old] for new, old in enumerate(rows) if old in self.problems}
        cells = {column: [values[row] for row in rows] for column, values in self.cells.items()}
        return Block(self.name, self.unit, [self.numbers[row] for row in rows], cells, problems)


def blocks_of(name: str, unit: str, rows: Iterable[tuple[int, Any]]) -> Iterator[Block]:
    """Group numbered rows into blocks. A row is {column: value}, or the RowProblem of a row that
    cannot be read."""
    keys: Any = ()

    def columns(row: tuple[int, Any]) -> Any:  # a problem does not end a block
        nonlocal keys
        keys = keys if isinstance(row[1], RowProblem) else row[1].keys()
        return keys

    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, BATCH)):
        for names, group in itertools.groupby(batch, columns):
            numbers, fields = zip(*group, strict=True)
            problems = {i: row for i, row in enumerate(fields) if isinstance(row, RowProblem)}
            if problems:
                fields = tuple({} if index in problems else row for index, row in enumerate(fields))
            cells = {column: [row.get(column) for row in fields] for column in names}
            yield Block(name, unit, numbers, cells, problems)


def data_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the format of a file (a value of KINDS) by its suffix, ignoring .gz. None if unknown."""
    name = Path(path).name.lower()
    kind = KINDS.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind == "parquet" and name.endswith(".gz") else kind  # parquet is compressed already


def known_kind(path: Path) -> str:
    """Return the format of a data file, as data_kind does. ValueError for an unknown suffix."""
    if (kind := data_kind(path)) is None:
        suffixes = f"{', '.join(KINDS)}; all but parquet may be followed by .gz"
        raise ValueError(f"{path}: unknown format; the suffix must be one of {suffixes}")
    return kind


def text_lines(path: Path, encoding: str = "utf-8", ends: bool = False) -> Iterator[tuple[int, str | None]]:
    """Yield (number from 1, line) of a text file, plain or .gz. With `ends`, keep the line ends. An
    undecodable line is None. Only a line feed ends a line, because sentences may contain U+2028, form
    feeds and similar characters."""
    number = 0
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            for number, raw in enumerate(cast(Iterable[bytes], file), 1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                try:
                    line = raw if ends else raw.removesuffix(b"\n").removesuffix(b"\r")
                    yield number, line.decode(encoding)
                except UnicodeDecodeError:
                    yield number, None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the file is damaged after line {number} ({error})") from error


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str] | RowProblem]]:
    warned = False
    for number, line in text_lines(path):
        cells = line.split("\t") if line else []
        if line and not warned and '""' in line and any(map(QUOTED.fullmatch, cells)):
            warned = True
            advice = "if the table has quoted cells, save it as .csv"
            logger.warning("%s, line %d: in TSV files, quotes are part of the text: %s", path, number, advice)
        yield number, RowProblem("not UTF-8") if line is None else cells


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str] | RowProblem]]:
    def lines() -> Iterator[str]:
        for number, line in text_lines(path, ends=True):
            if line is None:  # a line cannot be skipped, because it may be part of a quoted cell
                raise ValueError(f"{path}, line {number}: not UTF-8")
            yield line

    reader = csv.reader(lines(), strict=True)
    while True:
        start, limit = reader.line_num + 1, csv.field_size_limit(LONGEST_CELL)
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield start, RowProblem(str(error))
            continue
        finally:
            csv.field_size_limit(limit)  # a setting of the whole process
        yield start, row


def _table(path: Path, rows: Iterator[tuple[int, list[str] | RowProblem]]) -> Iterator[tuple[int, Any]]:
    """Yield the numbered rows below the header of a TSV or CSV file as {column: cell}."""
    names: list[str] = []
    for number, row in rows:
        if isinstance(row, RowProblem):
            if not names:
                raise ValueError(f"{path}, line {number}: invalid header: {row}")
            yield number, row
        elif not row:
            yield number, RowProblem("blank line", reason="blank line")
        elif names:
            if len(row) == len(names):
                yield number, dict(zip(names, row, strict=True))
            else:
                wrong = len(names) == 1 and ";" in names[0]
                hint = ": separate them with commas, not with ;" if wrong else ""
                yield (number, RowProblem(f"{len(row)} fields, but the header has {len(names)}{hint}"))
        elif len(set(row)) != len(row):
            raise ValueError(f"{path}, line {number}: the header has a duplicate column name: {row!s:.200}")
        elif sum(name.count("\t") for name in row) >= len(row):  # only possible in CSV
            advice = "rename the file to .tsv, with a first line that names the columns (STS-B's files "
            advice += "lack this line: raoe-train prepare stsb --copies DIR reads SentEval's folder)"
            raise ValueError(f"{path}, line {number}: a .csv file with tabs instead of commas: {advice}")
        else:
            names = row


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | RowProblem]]:
    """Yield the numbered rows of a file of any suffix with one JSON object on each line."""
    for number, line in text_lines(path):
        try:
            yield number, _object(line)
        except RowProblem as problem:
            yield number, problem


def _object(line: str | None) -> dict[str, Any]:
    if line is None:
        raise RowProblem("not UTF-8")
    if not line.strip():
        raise RowProblem("blank line", reason="blank line")
    try:
        fields = OBJECTS.decode(line)
        if "\\ud" in line.lower():  # a lone surrogate, which tables and files cannot hold
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RowProblem("invalid Unicode (lone surrogate)") from None
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise RowProblem(f"a JSON {type(fields).__name__}, not an object")
    return fields


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"duplicate key among {', '.join(name for name, _ in pairs)}")
    return fields


# by default, json keeps only the last of duplicate keys
OBJECTS = json.JSONDecoder(object_pairs_hook=_unique_keys)


def read_blocks(path: Path, name: str, unit: str = "line") -> Iterator[Block]:
    """Yield the rows of a data file in order. `name` and `unit` are for messages. ValueError if the
    file as a whole is invalid (damaged .gz, no header)."""
    kind = known_kind(path)
    if kind == "parquet":
        return _parquet_blocks(path, name)
    if kind == "jsonl":
        return blocks_of(name, unit, json_rows(path))
    return blocks_of(name, unit, _table(path, _tsv_rows(path) if kind == "tsv" else _csv_rows(path)))


def _parquet_blocks(path: Path, name: str) -> Iterator[Block]:
    import pyarrow.parquet
    from datasets import Features

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as table:
            schema = table.schema_arrow
            if len(set(schema.names)) != len(schema.names):
                raise ValueError(f"duplicate column name: {schema.names!s:.200}")
            is_dataset = b"huggingface" in (schema.metadata or {})
            features = Features.from_arrow_schema(schema) if is_dataset else {}
            for batch in table.iter_batches(BATCH):
                numbers = range(number + 1, number + 1 + len(batch))
                yield Block(name, "row", numbers, with_names(batch.to_pydict(), features))
                number += len(batch)
    except Exception as error:  # pyarrow raises many kinds of errors for damaged or unsupported data
        if isinstance(error, OSError) and error.errno:
            raise
        raise ValueError(f"{path}, after row {number}: {error}") from error


def with_names(cells: dict[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """Replace class numbers with class names, because each dataset has its own numbers."""
    for column, feature in features.items():
        if hasattr(feature, "int2str") and column in cells:
            cells[column] = [v if v in (None, -1) else feature.int2str(v) for v in cells[column]]
    return cells


def write_rows(path: str | os.PathLike[str], columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows atomically in the format of the suffix. ValueError for a value that the format
    cannot represent."""
    path = Path(path)
    kind = known_kind(path)
    with replacing(path) as temporary:
        if kind == "parquet":
            import pyarrow.parquet

            whole = list(rows)  # the type of a column depends on all of its values
            table = pyarrow.table({name: [row.get(name) for row in whole] for name in columns})
            pyarrow.parquet.write_table(table, temporary, write_page_checksum=True)
            return
        with open(temporary, "wb") as plain:
            binary: Any = plain
            if path.suffix.lower() == ".gz":  # equal rows give equal bytes: no name and time in the header
                binary = gzip.GzipFile("", "wb", fileobj=plain, mtime=0)
            with io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
                if kind == "jsonl":
                    for row in rows:
                        fields = {name: row.get(name) for name in columns}
                        file.write(json.dumps(fields, ensure_ascii=False, default=_in_json) + "\n")
                    return
                file.write(_line(columns, kind))
                for row in rows:
                    file.write(_line([cell(row.get(name), kind) for name in columns], kind))


def _line(cells: list[str], kind: str) -> str:
    if kind == "tsv":
        return "\t".join(cells) + "\n"
    line = io.StringIO()
    # Python before 3.13 does not quote cells with \r
    has_cr = any("\r" in text for text in cells)
    csv.writer(line, lineterminator="\n", quoting=csv.QUOTE_ALL if has_cr else csv.QUOTE_MINIMAL).writerow(cells)
    return line.getvalue()


def _in_json(value: Any) -> Any:
    """Convert parquet's types that JSON lacks: decimals to numbers, dates and times to ISO 8601."""
    if isinstance(value, Decimal):
        return float(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ValueError(f"a JSONL file cannot store {value!r:.200}: write .parquet instead")


def cell(value: Any, kind: str) -> str:
    """Format a value as a TSV or CSV cell, floats with all digits. ValueError if a cell cannot
    represent the value."""
    if isinstance(value, (list, dict)):
        raise ValueError(f"a {kind} file cannot store {value!r:.200}: write .jsonl instead")
    text = "" if value is None else str(value)
    if kind == "tsv" and any(mark in text for mark in "\t\n\r"):
        advice = "write .jsonl or .parquet"
        raise ValueError(f"a TSV cell cannot store tabs and line breaks, as in {text!r:.200}: {advice}")
    return text
