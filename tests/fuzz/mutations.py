"""Mutations of valid files: damaged values, columns and bytes, and other spellings of equal content."""

from __future__ import annotations

import csv
import gzip
import io
import json
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

Rows = list[dict[str, Any]]
TOKENS = (
    b"\x00", b"\xff", b'"', b"\t", b"\n", b"\r", b"\r\n", b"\n\n", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800",
    b"1" * 400, b"1" * 5000, b"1e999", b"-1e999", b"nan", b"Infinity", b"_", b"1_0", b"[" * 300, b"{", b"}",
    b"'", b",", b":", b"#", b"-", b"!!python/object:os.system ", b"!!int x", b"!!timestamp x", b"!!bool x",
    b"2020-13-45", b"&a ", b"*a", b"? ", b"null", b"true", b"\xe2\x80\xa8", b"\x1a", b"\x0c", b"\xd9\xa1",
    b"\x1f\x8b", b"PAR1", b"split", b"score", b"label", b"x" * 140_000, b"...", b"---",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, "", " ", "\x00", "a\tb", "a\nb", "a\r\nb", '"', "nan", "1e999", "1_0", "0x1", "-", "entailment", "x", True,
    False, 0, 1, -1, 10**30, 10**400, 2**63, 0.1, -0.0, 1e308, float("nan"), float("inf"), [], {}, [[]], ["a"],
    ["a", None], {"a": [1]}, [1, "a"], [0.5, float("nan")], "[" * 300, "['a', 'b', 'c']", "[{[]: 1}]",
    "[" + "-" * 3000 + "1]",
    "[1, 2", "\ufeffa", "\u2028", "e\u0301",
)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-le", "utf-32-be", "utf-8-sig", "latin-1", "cp1252", "utf-7")
ONLY_PARQUET: tuple[Any, ...] = (
    b"a", b"\xff", datetime(1, 1, 1), datetime(9999, 12, 31), timedelta(days=-1), Decimal("1.5"), Decimal("1e-30")
)  # fmt: skip


def nested(value: Any, rng: Random) -> Any:
    """Nest a value in up to 40 lists or objects."""
    for _ in range(rng.choice((1, 2, 40))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def spoilt_rows(rows: Rows, kind: str, rng: Random) -> Rows:
    """Change a value, rename a column, or remove or add one."""
    rows = [dict(row) for row in rows]
    row = rng.choice(rows)
    name = rng.choice(list(row))
    way = rng.randrange(7)
    if way == 0:
        row[name] = nested(row[name], rng)
    elif way == 1:
        del row[name]
    elif way == 2:
        rest = ["similarity", "text1", "anchor", "id", "split", "sentences", name + " ", name.upper(), ""]
        other = rng.choice([*rest, "\ufeff" + name])
        for each in rows:
            each[other] = each.get(name) if rng.random() < 0.5 else each.pop(name, None)
    elif way == 3:
        row[name] = rng.choice(list(rng.choice(rows).values()))
    else:
        row[name] = rng.choice(VALUES + (ONLY_PARQUET if kind == "parquet" else ()))
    return rows


def spoilt_bytes(content: bytes, rng: Random) -> bytes:
    """Cut, swap, replace, insert, remove, repeat or re-encode bytes."""
    size = len(content)
    at, other = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
    way = rng.randrange(11)
    if way == 0:
        return content[:other]
    if way == 1 and at < other < size:
        first, second = content[at : at + 1], content[other : other + 1]
        return content[:at] + second + content[at + 1 : other] + first + content[other + 1 :]
    if way == 2:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if way in (3, 4):
        return content[:at] + rng.choice(TOKENS) + content[at:]
    if way == 5:
        return content[:at] + content[at + rng.choice((1, 3, 30)) :]
    if way == 6:
        return content[:other] + content[at:other] + content[other:]
    if way == 7:
        lines = content.splitlines(keepends=True)
        rng.shuffle(lines)
        return b"".join(lines)
    if way == 8:
        return content.replace(b"\n", rng.choice((b"\r", b"\r\n", b"\n\n", b"\x00", b"\n\r")))
    if way == 9:
        text = content.decode("utf-8", "surrogateescape")
        return text.encode(rng.choice(ENCODINGS), "replace")
    return content[:at] + bytes(other - at) + content[other:]


def written(rows: Rows, kind: str, rng: Random, plain: bool) -> bytes:
    """Write rows in a format with libraries' writers; unless `plain`, in another spelling of equal content."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not plain:
        rng.shuffle(names)
    if kind == "parquet":
        return _parquet(rows, names, rng, plain)
    if kind == "jsonl":
        return _jsonl(rows, names, rng, plain)
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    if kind == "tsv":
        content = "".join("\t".join(row) + "\n" for row in cells)
    else:
        file = io.StringIO(newline="")
        quoting = csv.QUOTE_MINIMAL if plain else rng.choice((csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC))
        csv.writer(file, lineterminator="\n" if plain else rng.choice(("\n", "\r\n")), quoting=quoting).writerows(cells)
        content = file.getvalue()
    if not plain and kind == "tsv" and "\r" not in content:
        content = content.replace("\n", rng.choice(("\n", "\r\n")))
    return _at_the_ends(content.encode(errors="surrogatepass"), rng, plain)


def _cell(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=str)
    return "" if value is None else str(value)[:4000]


def _jsonl(rows: Rows, names: list[str], rng: Random, plain: bool) -> bytes:
    lines = []
    for row in rows:
        ascii_, space = (False, None) if plain else (rng.random() < 0.5, rng.choice(((" , ", " : "), (",", ":"))))
        ordered = {name: row[name] for name in names if name in row}
        lines.append(json.dumps(ordered, ensure_ascii=ascii_, separators=space, default=str))
    end = "\n" if plain else rng.choice(("\n", "\r\n", " \n"))
    return _at_the_ends((end.join(lines) + end).encode(errors="surrogatepass"), rng, plain)


def _at_the_ends(content: bytes, rng: Random, plain: bool) -> bytes:
    if plain:
        return content
    content = b"\xef\xbb\xbf" * rng.randrange(2) + content
    return content if rng.random() < 0.5 else content.removesuffix(b"\n").removesuffix(b"\r")


def _parquet(rows: Rows, names: list[str], rng: Random, plain: bool) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            columns.append(pyarrow.array(values))
        except (pyarrow.ArrowException, OverflowError, ValueError, TypeError):  # values that no column has
            columns.append(pyarrow.array([str(value)[:4000].encode("utf-8", "replace").decode() for value in values]))
    how: dict[str, Any] = {}
    if not plain:
        how = {
            "compression": rng.choice(("none", "snappy", "gzip", "zstd", "lz4")), "use_dictionary": rng.random() < 0.5,
            "row_group_size": rng.choice((1, 3, 1000)), "data_page_version": rng.choice(("1.0", "2.0")),
            "write_page_checksum": rng.random() < 0.5, "version": rng.choice(("1.0", "2.4", "2.6")),
        }  # fmt: skip
        columns = [_as_another(column, rng) for column in columns]
    elif rng.random() < 0.05:  # schemas allow a column twice
        names, columns = [*names, names[0]], [*columns, columns[-1]]
    file = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.table(columns, names=names), file, **how)
    except (pyarrow.ArrowException, UnicodeError):
        return b"PAR1"
    return file.getvalue()


def _as_another(column: Any, rng: Random) -> Any:
    import pyarrow

    if column.type == pyarrow.string():
        return rng.choice((column, column.cast(pyarrow.large_string()), column.dictionary_encode()))
    return column


def packed(content: bytes, rng: Random, plain: bool) -> bytes:
    """Compress with gzip; unless `plain`, as several members, some of them empty."""
    if plain:
        return gzip.compress(content, mtime=0)
    at = rng.randrange(len(content) + 1)
    return b"".join(gzip.compress(part, rng.randrange(10), mtime=0) for part in (content[:at], b"", content[at:]))
