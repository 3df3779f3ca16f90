"""Errors of writing, in words: what is full or may not be written, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
# How libraries that write by other means than Python's files say that the disk is full: safetensors (a class of its
# own), torch.save (RuntimeError; it does not say why).
SAID = ("No space left on device", "Disk quota exceeded", "File too large", "file write failed", "iostream error",
        "unexpected pos")  # fmt: skip


@contextmanager
def explained(output: str | None) -> Iterator[None]:
    """In this block, errors of writing `output` are OSErrors that say what to do; others go through as they are."""
    try:
        yield
    except OSError as error:
        where = error.filename or output
        if error.errno in FULL:
            raise OSError(_full(where, error.strerror)) from error
        if error.errno in REFUSED and output and _within(str(error.filename), output):
            raise OSError(
                f"cannot write {where} ({error.strerror}): choose another output (--output), or make this one a place "
                "that can be written"
            ) from error
        raise
    except Exception as error:
        if any(words in str(error) for words in SAID):
            raise OSError(_full(output, str(error).partition("\n")[0][:200])) from error
        raise


def _full(where: object, said: str | None) -> str:
    return (
        f"the disk is full, writing {where} ({said}). What was finished before is whole: make room and run the same "
        "command again, and it goes on from there"
    )


def _within(path: str, output: str) -> bool:
    """Whether a path is the output, above it, in it, or beside it by its name: OUTPUT.parts and the like."""
    ours, theirs = (str(Path(each).expanduser().absolute()) for each in (output, path))
    folder, name = os.path.split(theirs.replace(f"{os.sep}.partial.", os.sep))
    theirs = os.path.join(folder, name.removeprefix(".") if name.endswith(".lock") else name)
    return theirs == ours or theirs.startswith((ours + os.sep, f"{ours}.")) or ours.startswith(theirs + os.sep)
