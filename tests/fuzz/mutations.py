"""Mutations of valid files: damaged values, columns and bytes."""

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


def written(rows: Rows, kind: str) -> bytes:
    """Write rows in a format with libraries' writers."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if kind == "parquet":
        return _parquet(rows, names)
    if kind == "jsonl":
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        return "".join(lines).encode(errors="surrogatepass")
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    if kind == "tsv":
        return "".join("\t".join(row) + "\n" for row in cells).encode(errors="surrogatepass")
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(cells)
    return file.getvalue().encode(errors="surrogatepass")


def _cell(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=str)
    return "" if value is None else str(value)[:4000]


def _parquet(rows: Rows, names: list[str]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            columns.append(pyarrow.array(values))
        except (pyarrow.ArrowException, OverflowError, ValueError, TypeError):  # values that no column has
            columns.append(pyarrow.array([str(value)[:4000].encode("utf-8", "replace").decode() for value in values]))
    file = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.table(columns, names=names), file)
    except (pyarrow.ArrowException, UnicodeError):
        return b"PAR1"
    return file.getvalue()


def packed(content: bytes, rng: Random) -> bytes:
    """Compress with gzip, as several members, some of them empty."""
    at = rng.randrange(len(content) + 1)
    return b"".join(gzip.compress(part, rng.randrange(10), mtime=0) for part in (content[:at], b"", content[at:]))
