"""Simple independent readers that define the correct rows of a file."""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from typing import Any

NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
CLASSES = {"entailment": 0, "neutral": 1, "contradiction": 2, "0": 0, "1": 1, "2": 2}
Record = dict[str, Any]


class Broken(Exception):
    """The file has no valid content."""


def unpacked(content: bytes) -> bytes:
    """The content of a gzip file; Broken if it is damaged."""
    out = b""
    while content:
        member = zlib.decompressobj(31)
        try:
            out += member.decompress(content[:3] + bytes([content[3] & 31]) + content[4:])  # without reserved flags
        except (zlib.error, IndexError):
            raise Broken from None
        if not member.eof:
            raise Broken
        content = member.unused_data.lstrip(b"\x00")
    return out


def lines(content: bytes, encoding: str = "utf-8") -> list[str | None]:
    """The lines of a text; None if it is not UTF-8."""
    parts = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if parts[-1] == b"":
        parts.pop()
    results: list[str | None] = []
    for part in parts:
        part = part[:-1] if part.endswith(b"\r") else part
        try:
            results.append(part.decode(encoding))
        except UnicodeDecodeError:
            results.append(None)
    return results


def records(content: bytes, kind: str) -> Iterator[Record]:
    """The valid records of a file; Broken if the file cannot be read."""
    if kind == "jsonl":
        yield from _objects(content)
    elif kind == "parquet":
        yield from _table(content)
    else:
        rows = [line.split("\t") for line in lines(content) if line] if kind == "tsv" else _csv(content)
        if not rows or len(set(rows[0])) != len(rows[0]):
            raise Broken
        yield from (dict(zip(rows[0], row, strict=True)) for row in rows[1:] if len(row) == len(rows[0]))


def _objects(content: bytes) -> Iterator[Record]:
    for line in lines(content):
        try:
            result = json.loads(line or "", object_pairs_hook=_once)
            json.dumps(result, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            continue
        if isinstance(result, dict):
            yield result


def _once(pairs: list[tuple[str, Any]]) -> Record:
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def _csv(content: bytes) -> list[list[str]]:
    """RFC 4180, character by character; a record that breaks its rules ends with its line."""
    try:
        text = content.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError:
        raise Broken from None
    rows: list[list[str]] = []
    row, field, state, there = list[str](), "", "start", False
    for mark in text if text.endswith("\n") else text + "\n":
        if state == "quoted":
            field, state = (field, "quote") if mark == '"' else (field + mark, "quoted")
        elif mark == "\n":
            if state != "bad" and there:
                rows.append([*row, field])
            row, field, state, there = [], "", "start", False
        elif state == "bad" or state == "return":
            state = "bad"
        elif mark == '"' and state in ("start", "quote"):
            field, state = field + '"' * (state == "quote"), "quoted"
        elif mark == ",":
            row, field, state = [*row, field], "", "start"
        elif mark == "\r":
            state = "return"
            continue
        else:
            field, state = field + mark, "bad" if state == "quote" else "plain"
        there = there or mark != "\n"
    return rows


def _table(content: bytes) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(io.BytesIO(content))
        if len(set(table.column_names)) != len(table.column_names):
            raise Broken
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError, MemoryError):
        raise Broken from None
    for row in range(table.num_rows):
        yield {name: column[row] for name, column in columns.items()}


def text(value: Any) -> str | None:
    """Whether a value is a non-empty text."""
    return value if isinstance(value, str) and value.strip() else None


def number(value: Any) -> float | None:
    """Whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        try:
            value = None if isinstance(value, (bool, list, dict, bytes)) else str(value)
        except UnicodeDecodeError:
            return None
    if value is None or (isinstance(value, str) and not NUMBER.fullmatch(value)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def word(value: Any) -> str | None:
    """The name of a class."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (list, dict, bytes)) or value is None or value != value:
        return None
    return str(value).strip() or None


def label(value: Any) -> int | None:
    """0 entailment, 1 neutral, 2 contradiction."""
    named = None if isinstance(value, bool) else word(value)
    return None if named is None else CLASSES.get(named.lower())
