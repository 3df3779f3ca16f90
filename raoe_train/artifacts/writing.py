"""Write files completely or not at all, read JSON files, and explain errors of a full disk."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Full-disk messages of libraries that do not raise OSError: safetensors (its own error class) and torch.save
# (RuntimeError without a reason).
FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "file write failed",
              "iostream error", "unexpected pos")  # fmt: skip


def check_writable(path: Path, key: str) -> None:
    """Raise ValueError with the setting's `key` if a folder cannot be created. Read-only folders are accepted."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{key} {path} cannot be written: {existing} is a file; choose another folder")
    if existing != path.absolute() and not os.access(existing, os.W_OK):
        raise ValueError(f"{key} {path} cannot be written: {existing} is read-only; choose another folder")


def partial(path: Path) -> Path:
    """Return the temporary path for writing a file or folder. The next run overwrites what a killed job left there."""
    # a prefix, not a suffix, because the suffix sets the format
    return path.with_name(f".partial.{path.name}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends, or is removed if the block fails. A killed job
    leaves the old file or the new file, never half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def set_modes(folder: str | os.PathLike[str]) -> None:
    """Give weights in a folder the mode of its other files: safetensors lets only their owner read them."""
    mask = os.umask(0o077)  # the only way to read the mask is to set it
    os.umask(mask)
    for path in Path(folder).rglob("*.safetensors"):
        with suppress(OSError):  # raised by file systems without modes
            path.chmod(0o666 & ~mask)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write `content` as indented JSON atomically. ValueError for NaN and infinities."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Return {} if the file does not exist or holds no valid object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def explained(output: str | None) -> Iterator[None]:
    """Replace full-disk errors in the `with` block with an OSError that says what to do. Other errors do not change."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) not in FULL and not any(words in str(error) for words in FULL_WORDS):
            raise
        target, reason = getattr(error, "filename", None) or output, str(error).partition("\n")[0][:200]
        raise OSError(
            f"the disk is full: cannot write {target} ({reason}). Finished files are complete: free some space and run "
            "the same command again to resume"
        ) from error
