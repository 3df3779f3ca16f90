"""Read and write tables row by row: TSV, CSV and JSONL, each also as .gz, and parquet.

TSV files (also .txt, as SNLI and SICK are published) are read without quoting: `"` is an ordinary character."""

import csv
import gzip
import io
import itertools
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from raoe_train.data.columns import RowProblem
from raoe_train.outputs import replacing

KINDS = {".tsv": "tsv", ".txt": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')  # a cell as CSV quotes it, with a quote inside
logger = logging.getLogger(__name__)
Row = tuple[int, dict[str, Any] | RowProblem]
"""(line where a row starts, or in parquet its row number from 1; the row's fields, or the problem with the row)."""


def data_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the format (a value of KINDS) of a file by its suffix, ignoring .gz. None for an unknown suffix."""
    name = Path(path).name.lower()
    kind = KINDS.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind == "parquet" and name.endswith(".gz") else kind  # parquet files are compressed already


def existing_file(name: str | os.PathLike[str]) -> Path:
    """Return the path of a data file. FileNotFoundError or ValueError if `name` is not a data file."""
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no such file: {str(path)!r} (for a dataset on a hub write hub:OWNER/NAME#SPLIT)")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, not a data file: convert a saved Dataset with to_parquet()")
    if not path.is_file():
        raise ValueError(f"{path} is a pipe or a device, which can be read only once: use a file")
    known_kind(path)
    return path


def known_kind(path: Path) -> str:
    """Return the format of a data file, as data_kind does. ValueError for an unknown suffix."""
    if (kind := data_kind(path)) is None:
        suffixes = f"{', '.join(KINDS)}; all but parquet may be followed by .gz"
        raise ValueError(f"{path}: unknown format; the suffix must be one of {suffixes}")
    return kind


def read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Yield the rows of a data file in order. ValueError if the file as a whole is invalid (damaged .gz, no header)."""
    path = existing_file(path)
    return READERS[known_kind(path)](path)


def text_lines(path: Path, encoding: str = "utf-8", ends: bool = False) -> Iterator[tuple[int, str | None]]:
    """Yield (number from 1, line) of a text file, plain or .gz. With `ends`, keep the line ends. An undecodable line is
    None. Only a line feed ends a line, because sentences may contain U+2028, form feeds and similar characters."""
    number = 0
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            for number, raw in enumerate(cast(Iterable[bytes], file), 1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                try:
                    yield number, (raw if ends else raw.removesuffix(b"\n").removesuffix(b"\r")).decode(encoding)
                except UnicodeDecodeError:
                    yield number, None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the file is damaged after line {number} ({error})") from error


def _tsv(path: Path) -> Iterator[Row]:
    def records() -> Iterator[tuple[int, list[str] | RowProblem]]:
        quoted = ""
        for number, line in text_lines(path):
            cells = line.split("\t") if line else []
            if not quoted and line and '""' in line and (quoted := next(filter(QUOTED.fullmatch, cells), "")):
                logger.warning("%s, line %d: in TSV files, quotes are part of the text, as in %.60s: if the table has "
                               "quoted cells, save it as .csv", path, number, quoted)  # fmt: skip
            yield number, RowProblem("not UTF-8") if line is None else cells

    return _table(path, records())


def _csv(path: Path) -> Iterator[Row]:
    def lines() -> Iterator[str]:
        for number, line in text_lines(path, ends=True):
            if line is None:  # a line cannot be skipped, because it may be part of a quoted field
                raise ValueError(f"{path}, line {number}: not UTF-8")
            yield line

    def records() -> Iterator[tuple[int, list[str] | RowProblem]]:
        reader = csv.reader(lines(), strict=True)
        while True:
            start = reader.line_num + 1
            try:
                yield start, next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield start, RowProblem(str(error))

    return _table(path, records())


def _table(path: Path, records: Iterator[tuple[int, list[str] | RowProblem]]) -> Iterator[Row]:
    names: list[str] | None = None
    for number, record in records:
        if isinstance(record, RowProblem):
            if names is None:
                raise ValueError(f"{path}, line {number}: invalid header: {record}")
            yield number, record
        elif not record:
            yield number, RowProblem("blank line", reason="blank line")
        elif names is None:
            names = record
            if len(set(names)) != len(names):
                raise ValueError(f"{path}, line {number}: the header has a duplicate column name: {names!s:.200}")
        elif len(record) != len(names):
            hint = ": separate them with commas, not with ;" if len(names) == 1 and ";" in names[0] else ""
            yield number, RowProblem(f"{len(record)} fields, but the header has {len(names)}{hint}")
        else:
            yield number, dict(zip(names, record, strict=True))


def _json(line: str | None) -> dict[str, Any] | RowProblem:
    if line is None:
        return RowProblem("not UTF-8")
    if not line.strip():
        return RowProblem("blank line", reason="blank line")
    try:
        fields = OBJECTS.decode(line)
        if "\\ud" in line.lower():  # a lone surrogate, which tables and files cannot hold
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return RowProblem("invalid Unicode (lone surrogate)")
    except (ValueError, RecursionError) as error:
        return RowProblem(f"not JSON ({error})")
    return fields if isinstance(fields, dict) else RowProblem(f"a JSON {type(fields).__name__}, not an object")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"duplicate key among {', '.join(name for name, _ in pairs)}")
    return fields


OBJECTS = json.JSONDecoder(object_pairs_hook=_unique_keys)  # by default, json keeps only the last of duplicate keys


def read_jsonl(path: Path) -> Iterator[Row]:
    """Read a file of any suffix with one JSON object on each line."""
    return ((number, _json(line)) for number, line in text_lines(path))


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as table:
            if len(set(names := table.schema_arrow.names)) != len(names):
                raise ValueError(f"duplicate column name: {names!s:.200}")
            classes = _classes_of(table.schema_arrow)
            for batch in table.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield number, name_classes(fields, classes)
    except Exception as error:  # pyarrow raises many kinds of errors for damaged or unsupported data
        if isinstance(error, OSError) and error.errno:
            raise
        raise ValueError(f"{path}, after row {number}: {error}") from error


def _classes_of(schema: Any) -> dict[str, Any]:
    """Return class_labels of a parquet file written by the library datasets; {} for other parquet files."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    from datasets import Features

    return class_labels(Features.from_arrow_schema(schema))


def class_labels(features: Any) -> dict[str, Any]:
    """Return {column: ClassLabel} from the features of a dataset."""
    from datasets import ClassLabel

    return {column: kind for column, kind in features.items() if isinstance(kind, ClassLabel)}


def name_classes(fields: dict[str, Any], classes: dict[str, Any]) -> dict[str, Any]:
    """Replace the class numbers in a row with class names, because each dataset has its own numbers."""
    labels = {column: kind for column, kind in classes.items() if fields[column] not in (None, -1)}
    return {**fields, **{column: kind.int2str(fields[column]) for column, kind in labels.items()}}


READERS = {"tsv": _tsv, "csv": _csv, "jsonl": read_jsonl, "parquet": _parquet}


def write_rows(path: str | os.PathLike[str], columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows atomically in the format of the suffix. ValueError for a value that the format cannot represent."""
    path = Path(path)
    kind = known_kind(path)
    values: Iterator[list[Any]] = ([row.get(name) for name in columns] for row in rows)
    with replacing(path) as temporary:
        if kind == "parquet":
            import pyarrow.parquet

            table_rows = list(values)  # keep all rows, because a column's type depends on all of its values
            table = pyarrow.table({name: [row[place] for row in table_rows] for place, name in enumerate(columns)})
            pyarrow.parquet.write_table(table, temporary, write_page_checksum=True)
            return
        with open(temporary, "wb") as plain:
            # no file name and time in the gzip header, so that equal rows give equal bytes
            binary: Any = gzip.GzipFile("", "wb", fileobj=plain, mtime=0) if path.suffix.lower() == ".gz" else plain
            with io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
                header = [columns] if kind != "jsonl" else []
                for row in itertools.chain(header, values):
                    _write_row(file, kind, columns, row)


def _write_row(file: io.TextIOWrapper, kind: str, columns: list[str], row: list[Any]) -> None:
    if kind == "jsonl":
        file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, default=_in_json) + "\n")
        return
    cells = [cell(value, kind) for value in row]
    if kind == "tsv":
        file.write("\t".join(cells) + "\n")
    else:
        has_cr = any("\r" in text for text in cells)  # Python before 3.13 does not quote cells with \r
        writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if has_cr else csv.QUOTE_MINIMAL)
        writer.writerow(cells)


def _in_json(value: Any) -> Any:
    """Convert parquet's types that JSON lacks: decimals to numbers, dates and times to ISO 8601 strings."""
    if isinstance(value, Decimal):
        return float(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ValueError(f"a JSONL file cannot store {value!r:.200}: write .parquet instead")


def cell(value: Any, kind: str) -> str:
    """Format a value as a TSV or CSV cell, floats with all digits. ValueError if a cell cannot represent the value."""
    if value is None:
        return ""
    if isinstance(value, (list, dict)):
        raise ValueError(f"a {kind} file cannot store {value!r:.200}: write .jsonl instead")
    text = str(value)
    if kind == "tsv" and any(mark in text for mark in "\t\n\r"):
        raise ValueError(f"a TSV cell cannot store tabs and line breaks, as in {text!r:.200}: write .jsonl or .parquet")
    if kind == "csv" and len(text) > csv.field_size_limit():  # Python could not read it back
        raise ValueError(f"a CSV cell cannot store {len(text)} characters: write .jsonl or .parquet instead")
    return text
