"""Read and write data files: TSV, CSV and JSONL (each also as .gz), and parquet.

TSV files are read without quoting, so `"` is an ordinary character. Tables with the suffix .txt are read as TSV,
because SNLI and SICK are published in this form. TSV and CSV files are not read with pyarrow or pandas, which would end
rows at a carriage return and accept unbalanced quotes.
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
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from raoe_train.data.columns import RowProblem, Rows
from raoe_train.outputs import replacing

KINDS = {f".{kind}": kind for kind in ("tsv", "csv", "jsonl", "parquet")}
KINDS |= {".txt": "tsv", ".ndjson": "jsonl"}
LONGEST_CELL = 2**31 - 1  # limit for CSV files; TSV and JSON have no limit
QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')  # a cell as CSV quotes it, with a quote inside
logger = logging.getLogger(__name__)
Cells = Iterator[tuple[int, list[str] | RowProblem]]


def data_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the format of a file (a value of KINDS) by its suffix, ignoring .gz. Return None for an unknown suffix."""
    name = Path(path).name.lower()
    kind = KINDS.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind == "parquet" and name.endswith(".gz") else kind  # parquet is compressed


def known_kind(path: Path) -> str:
    """Return the format of a data file (see data_kind). Raise ValueError if its suffix is unknown."""
    if (kind := data_kind(path)) is None:
        suffixes = f"{', '.join(KINDS)}; all but parquet may be followed by .gz"
        raise ValueError(f"{path}: unknown format; the suffix must be one of {suffixes}")
    return kind


def text_lines(path: Path, encoding: str = "utf-8", *, ends: bool = False) -> Iterator[Any]:
    """Yield (line number, line) for each line of a text file, plain or .gz. Numbers start at 1. A line that cannot be
    decoded is yielded as None. With `ends`, lines keep their line terminators. Only a line feed ends a line, because
    texts may contain other line separators, such as U+2028."""
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


def _tsv_cells(path: Path) -> Cells:
    warned = False
    for number, line in text_lines(path):
        cells = line.split("\t") if line else []
        if line and not warned and '""' in line and any(map(QUOTED.fullmatch, cells)):
            warned = True
            advice = "quotes are part of the text. If the table has quoted cells, save it as a .csv file"
            logger.warning("%s, line %d: in TSV files, %s", path, number, advice)
        yield number, RowProblem("not UTF-8") if line is None else cells


def _csv_cells(path: Path) -> Cells:
    def lines() -> Iterator[str]:
        for number, line in text_lines(path, ends=True):
            if line is None:  # a line cannot be skipped, because it may be part of a quoted cell
                raise ValueError(f"{path}, line {number}: not UTF-8; save the file in UTF-8")
            yield line

    reader, record = csv.reader(lines(), strict=True), cast(Any, ())
    while record is not None:
        start, limit = reader.line_num + 1, csv.field_size_limit(LONGEST_CELL)
        try:
            record = next(reader, None)
        except csv.Error as error:
            record = RowProblem(str(error))
        finally:
            csv.field_size_limit(limit)  # a process-wide setting
        if record is not None:
            yield start, record


def _table_rows(where: str, records: Cells) -> Rows:
    names, hint = list[str](), ""
    for number, cells in records:
        place = f"{where} {number}"
        if not cells:
            yield place, RowProblem("blank line", reason="blank line")
        elif isinstance(cells, RowProblem):
            if not names:
                raise ValueError(f"{place}: invalid header: {cells}")
            yield place, cells
        elif not names:
            names = cells
            if len({*names}) < len(names):
                raise ValueError(f"{place}: the header has a duplicate column name: {names!s:.200}")
            if sum(name.count("\t") for name in names) >= len(names):
                advice = "rename the file to .tsv, and check that its first line names the columns "
                advice += "(STS-B's files lack this line: read them with the job prepare)"
                raise ValueError(f"{place}: this .csv file has tabs instead of commas: {advice}")
            if len(names) == 1 and ";" in names[0]:
                hint = ": separate them with commas, not with ;"
        elif len(cells) != len(names):
            yield place, RowProblem(f"{len(cells)} fields, but the header has {len(names)}{hint}")
        else:
            yield place, dict(zip(names, cells, strict=True))


def json_rows(path: Path, where: str) -> Rows:
    """Yield the rows of a file (with any suffix) that contains one JSON object per line."""
    return ((f"{where} {number}", _json(line)) for number, line in text_lines(path))


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
    kind = type(fields).__name__
    return fields if isinstance(fields, dict) else RowProblem(f"a JSON {kind}, not an object")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"each key may occur only once in a JSON object, got {', '.join(name for name, _ in pairs)}")
    return fields


OBJECTS = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _parquet_rows(path: Path, where: str) -> Rows:
    import pyarrow.parquet
    from datasets import Features

    place = f"{where} 0"
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as table:
            schema = table.schema_arrow
            if len({*schema.names}) < len(schema.names):
                raise ValueError(f"duplicate column name: {schema.names!s:.200}")
            is_dataset = b"huggingface" in (schema.metadata or {})
            features = Features.from_arrow_schema(schema) if is_dataset else {}
            batches = (batch.to_pydict() for batch in table.iter_batches())
            for place, row in batch_rows(where, batches, features):
                yield place, row
    except Exception as error:  # pyarrow raises many kinds of errors for damaged data
        if isinstance(error, OSError) and error.errno:
            raise
        raise ValueError(f"{path} cannot be read after {place.rpartition(', ')[2]}: {error}") from error


def batch_rows(where: str, batches: Iterable[Mapping[str, Any]], features: Mapping[str, Any]) -> Rows:
    """Yield the rows of batches, where each batch is {column: values}. Class numbers are replaced by class names,
    because the numbering of classes differs between datasets."""
    classes = {column: kind for column, kind in features.items() if hasattr(kind, "int2str")}
    number = 0
    for batch in batches:
        for values in zip(*batch.values(), strict=True):
            number += 1
            row = dict(zip(batch, values, strict=True))
            for column, kind in classes.items():
                if row[column] not in (None, -1):
                    row[column] = kind.int2str(row[column])
            yield f"{where} {number}", row


def read_rows(path: Path, where: str = "") -> Rows:
    """Yield the rows of a data file. `where` is the file's name in error messages (default: its path). Raise ValueError
    if the whole file is invalid (for example, a damaged .gz file or an invalid header)."""
    if (kind := known_kind(path)) == "parquet":
        return _parquet_rows(path, f"{path}, row")
    where = where or f"{path}, line"
    if kind == "jsonl":
        return json_rows(path, where)
    return _table_rows(where, _tsv_cells(path) if kind == "tsv" else _csv_cells(path))


def write_rows(path: Any, columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows atomically, in the format given by the suffix of `path`. Raise ValueError for a value that this format
    cannot store."""
    path = Path(path)
    kind = known_kind(path)
    with replacing(path) as temporary:
        if kind == "parquet":
            import pyarrow.parquet

            whole = list(rows)  # a column's type depends on all of its values
            table = {name: [row.get(name) for row in whole] for name in columns}
            pyarrow.parquet.write_table(pyarrow.table(table), temporary, write_page_checksum=True)
            return
        with open(temporary, "wb") as plain:
            binary: Any = plain
            if path.suffix.lower() == ".gz":  # no name and no time, so equal rows give equal bytes
                binary = gzip.GzipFile("", "wb", fileobj=plain, mtime=0)
            with io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
                if kind == "jsonl":
                    for row in rows:
                        fields = {name: row.get(name) for name in columns}
                        file.write(json.dumps(fields, ensure_ascii=False, default=_in_json) + "\n")
                    return
                styles: Any = (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
                writers = [csv.writer(file, lineterminator="\n", quoting=style) for style in styles]
                for row in itertools.chain([{name: name for name in columns}], rows):
                    cells = [cell(row.get(name), kind) for name in columns]
                    if kind == "csv":
                        # Python before 3.13 does not quote cells with \r
                        writers[any("\r" in text for text in cells)].writerow(cells)
                    else:
                        file.write("\t".join(cells) + "\n")


def _in_json(value: Any) -> Any:
    """Convert a value whose type JSON does not support: a decimal to a number, a date or time to an ISO 8601 string."""
    if isinstance(value, Decimal):
        return float(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ValueError(f"a JSONL file cannot store {value!r:.200}: write a .parquet file instead")


def cell(value: Any, kind: str) -> str:
    """Format a value as a TSV or CSV cell. Floats keep all digits. Raise ValueError for lists and dicts and, in TSV
    files, for texts with tabs or line breaks."""
    text = "" if value is None else str(value)
    if isinstance(value, (list, dict)):
        raise ValueError(f"a {kind} file cannot store {text:.200}: write a .jsonl file instead")
    if kind == "tsv" and any(mark in text for mark in "\t\n\r"):
        problem = "a TSV cell cannot store tabs or line breaks"
        raise ValueError(f"{problem}, as in {text!r:.200}: write a .jsonl or .parquet file")
    return text
