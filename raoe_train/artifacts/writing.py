"""Files that are written whole or not at all, and read back; a full disk in words."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How libraries that write by other means than Python's files say so: safetensors (a class of its own), torch.save
# (RuntimeError; it does not say why).
FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "file write failed",
              "iostream error", "unexpected pos")  # fmt: skip


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


@contextmanager
def explained(output: str | None) -> Iterator[None]:
    """In this block, errors of a full disk are OSErrors that say what to do; others go through as they are."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) not in FULL and not any(words in str(error) for words in FULL_WORDS):
            raise
        where, reason = getattr(error, "filename", None) or output, str(error).partition("\n")[0][:200]
        raise OSError(
            f"the disk is full, writing {where} ({reason}). What was finished before is whole: make room and run the "
            "same command again to resume"
        ) from error
