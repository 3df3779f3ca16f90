"""Files that are written whole or not at all, and read back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_writable(path: Path, kind: str, key: str) -> None:
    """ValueError, with the key, where no file, or no folder, as the kind says, could be written. A folder that is there
    may be one to read from."""
    if kind == "file" and path.is_dir():
        raise ValueError(f"{key} {path} is a folder: name a file")
    places = [path.absolute(), *path.absolute().parents][kind == "file" :]
    there = next(place for place in places if place.exists())
    if not there.is_dir():
        raise ValueError(f"{key} {path} cannot be written: {there} is a file")
    if there != path.absolute() and not os.access(there, os.W_OK):
        raise ValueError(f"{key} {path} cannot be written: {there} is read-only")


def partial(path: Path) -> Path:
    """Where a file, or a folder, is while it is written: always there, so that what a kill leaves is written over."""
    # in front, so that the suffix still names the format
    return path.with_name(f".partial.{path.name}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well and is removed when it does not: a
    killed job leaves the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its place when the block ends well; not before then the old one goes."""
    temporary, old = partial(folder), folder.with_name(f".replaced.{folder.name}")
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)  # a killed process's
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
    finally:
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write `content` as indented JSON in one step; NaN and infinities are errors."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no such file, or something else in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
