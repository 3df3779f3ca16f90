"""Job outputs: complete files, records of finished work, and parts that a resumed job reuses.

An output is a file or a folder. The *record* is a JSON file: OUTPUT.json next to a file, or OUTPUT/made_from.json in a
folder. The record contains the settings (see `raoe_train.inputs`) and, once the output is finished, the result.
Unfinished work for a file is stored in OUTPUT.parts/DIGEST/. DIGEST is computed from the settings, so jobs with other
settings never use this work. A file without a record was not written by raoe, and is never replaced.
"""

import errno
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from raoe_train.processes import rank_and_world

MADE_FROM = "made_from.json"  # record of a folder
NO_WORK = (MADE_FROM, "recipe.yaml", "initial")  # files of a run that has no work to resume
UNFINISHED = ("checkpoints", "initial", "teacher")  # folders in the folder of an unfinished run
BESIDE = (".json", ".parts", ".failed.jsonl", ".examples.npz")  # suffixes of paths next to an output file
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)  # errors of a file system without locks
POLL = 0.2  # seconds between checks for the work of other processes
PATIENCE = 600.0  # seconds to wait for another process, which may have ended
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Full-disk messages from libraries that do not raise OSError: safetensors (its own error class) and torch.save
# (RuntimeError without a reason).
FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "file write failed",
              "iostream error", "unexpected pos")  # fmt: skip


def check_writable(path: Path, key: str) -> None:
    """Raise ValueError, naming the setting `key`, if a folder cannot be created. Existing folders are not checked."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{key} {path} cannot be written: {existing} is a file; choose another folder")
    if existing != path.absolute() and not os.access(existing, os.W_OK):
        raise ValueError(f"{key} {path} cannot be written: {existing} is read-only; choose another folder")


def partial(path: Path) -> Path:
    """Return a temporary path for a file or folder to write. The next run overwrites what a killed job left there."""
    # a prefix, because the suffix sets the format; with the rank, because two processes may write the same part
    return path.with_name(f".partial{rank_and_world()[0] or ''}.{path.name}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path. The file at this path replaces `path` when the block ends, or is removed if the block
    fails. A killed job leaves either the old file or the new file at `path`, never a partly written file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def set_modes(folder: str | os.PathLike[str]) -> None:
    """Give a folder's weight files the usual permissions, because safetensors lets only the owner read them."""
    mask = os.umask(0o077)  # the only way to read the mask is to set it
    os.umask(mask)
    for path in Path(folder).rglob("*.safetensors"):
        with suppress(OSError):  # raised by file systems without permissions
            path.chmod(0o666 & ~mask)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Atomically write `content` as indented JSON. Raise ValueError for NaN and infinity."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object. Return {} if the file does not exist or contains no valid object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def explained(output: str | None) -> Iterator[None]:
    """Replace full-disk errors in the `with` block with an OSError that says what to do. Other errors are unchanged."""
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


class Output:
    """One output of a job.

    Args:
        path: the file, or the folder if `folder` is True. Links are followed.
        settings: everything that determines the result, as plain values.
        overwrite: whether to replace an output that was made with other settings.
        folder: whether the output is a folder. Only files that its record lists are ever removed.
        own_record: whether the output is a JSON file that is its own record.
        result: name of the JSON file in the folder that stores the result instead of the record.

    Attributes:
        parts: folder for unfinished work.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        overwrite: bool = False,
        *,
        folder: bool = False,
        own_record: bool = False,
        result: str = "",
    ) -> None:
        self.path, self.user_path = Path(path).expanduser().resolve(), str(path)
        self.settings = json.loads(json.dumps(settings))  # convert to JSON's types, to compare with a record
        self.overwrite, self.folder, self.result = overwrite, folder, result
        self.record = self.path if own_record else self.path / MADE_FROM if folder else beside(self.path, ".json")
        self.all_parts = beside(self.path, ".parts")
        self.unfinished = [self.path / name for name in UNFINISHED] if folder else [self.all_parts]
        self.parts = self.all_parts / digest(self.settings)[:16]

    def finished(self, say: bool = False) -> dict[str, Any] | None:
        """Return the result of an output that was finished with the same settings, or None if the job can start or
        resume. With `say`, print how to run a finished job again.

        Raises:
            ValueError: the path is a folder instead of a file (or the reverse), the output has no record, or its
                record has other settings and `overwrite` is False.
        """
        if self.path.exists() and self.path.is_dir() != self.folder:
            kind, needed = ("file", "folder") if self.folder else ("folder", "file")
            raise ValueError(f"output {self.path} is a {kind}, but this job writes a {needed}: choose another output")
        record, exists = read_json(self.record), self._exists()
        if "settings" not in record:
            if exists or self.record.exists():
                raise ValueError(f"output {self.path} exists and was not written by raoe-train: choose another output")
            return None
        changed = different(record["settings"], self.settings)
        if not changed and record.get("finished") and exists:
            self.clear()  # what a killed process has left
            result = {key: value for key, value in record.items() if key not in ("finished", "files")}
            if self.result and not (result := read_json(self.path / self.result)):
                return None
            if say and rank_and_world()[0] == 0:
                print(f"{self.user_path} is already finished with these settings; to run the job again, remove it")
            return result
        if changed and exists and not self.overwrite:
            how = f"with other settings or inputs (different: {', '.join(changed)})"
            advice = "choose another output, or pass --overwrite to replace this output"
            raise ValueError(f"output {self.path} was written {how}: {advice}")
        return None

    @property
    def replaces(self) -> bool:
        """Whether the method `begin` will remove an output that was made with other settings."""
        record = read_json(self.record)
        return "settings" in record and bool(different(record["settings"], self.settings))

    def begin(self, *files: str) -> None:
        """Write the record. Call this method right before writing to a folder. If the folder's old record is finished
        or has other settings, the files listed in the old record are removed. A later run may remove the files named in
        `files`."""
        record = read_json(self.record)
        if record.get("finished") or different(record.get("settings"), self.settings):
            if self.folder:
                if "finished" in record:  # before removing files: a killed process must leave no finished record
                    write_json(self.record, {**record, "finished": False})
                for path in (self.path / name for name in record.get("files", [])):
                    if self.path in path.parent.resolve().joinpath(path.name).parents:  # only inside the folder
                        remove(path)
                        with suppress(OSError):  # raised for a folder that is not empty
                            os.removedirs(path.parent)
            record = {"settings": self.settings}
        names = dict.fromkeys([*record.get("files", []), *files])
        write_json(self.record, {**record, "files": [*names]})

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the record of a finished output (result, settings, versions), and remove unfinished work."""
        result = {} if self.result else result
        record = {"output": self.user_path, **result, "settings": self.settings, "versions": versions()}
        names = read_json(self.record).get("files", [])  # expand folders to their files: users may add files later
        files = [str(path.relative_to(self.path)) for name in names for path in files_in(self.path / name)]
        write_json(self.record, {**record, "finished": True, "files": files})
        self.clear()
        return record

    def clear(self) -> None:
        """Remove the files that only unfinished work needs."""
        for path in self.unfinished:
            remove(path)

    def wait(self) -> dict[str, Any]:
        """Wait until rank 0 has finished. Return the output's result, or raise OSError if rank 0 ended without one."""
        deadline = time.monotonic() + PATIENCE
        while not (result := self.finished()):
            time.sleep(POLL)
            if time.monotonic() > deadline:
                deadline += PATIENCE
                with suppress(ValueError), locked(self.path) as is_locked:  # ValueError while rank 0 holds the lock
                    if is_locked and not self.finished():
                        raise OSError(f"rank 0 has ended without writing {self.path}: run the same command to resume")
        return result

    def _exists(self) -> bool:
        """Return whether the output file exists, or the output folder contains files other than a (partial) record."""
        if self.path.is_dir():
            half = f".partial*.{self.record.name}"
            return any(path != self.record and not path.match(half) for path in self.path.iterdir())
        return self.path.exists()


def digest(content: Any) -> str:
    """Return the hexadecimal SHA-256 digest of plain values, serialized as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def different(old: Any, new: Any, prefix: str = "") -> Sequence[str]:
    """Return the dotted keys in which two nested settings differ. A missing key and a null value count as different."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [f"{prefix}{key}" for key in new.keys() ^ old.keys()]
        for key in new.keys() & old.keys():
            keys += different(old[key], new[key], f"{prefix}{key}.")
        return sorted(keys)
    is_equal = old == new and isinstance(old, bool) == isinstance(new, bool)
    return [] if is_equal else [prefix.rstrip(".") or "all"]


def versions() -> dict[str, str]:
    """Return {name: version} for Python and for the installed packages that affect results."""
    packages = {"python": platform.python_version()}
    for package in ("raoe", "torch", "transformers", "sentence-transformers", "numpy", "scipy", "scikit-learn"):
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return packages


@contextmanager
def locked(path: str | Path) -> Iterator[bool]:
    """Hold a lock file next to an output during the `with` block. The lock is released if the process dies. Raise
    ValueError if another process holds the lock. An output and links to it share one lock. Yield False if the file
    system does not support locks."""
    path = Path(path).expanduser().resolve()
    lock_file = path.with_name(f".{path.name}.lock")
    new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another process is writing to {path}: wait, or choose another output") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"warning: the file system does not support file locks: make sure that no other process writes to {path}")
    try:
        yield lock.is_locked
    finally:
        record = read_json(path / MADE_FROM)
        if "settings" in record and not record.get("finished") and not any(map(_is_work, path.iterdir())):
            remove(path)  # the job failed before it wrote any work to resume
        lock_file.unlink(missing_ok=True)
        lock.release()
        for folder in new_folders:
            with suppress(OSError):  # raised for a folder that is not empty, and for a file
                folder.rmdir()


def _is_work(path: Path) -> bool:
    """Return whether a path in an unfinished output contains work to resume, log lines, or the user's files."""
    is_empty_log = path.name == "log.jsonl" and path.stat().st_size == 0
    return path.name not in NO_WORK and not is_empty_log and bool(files_in(path))


@contextmanager
def replacing_model(output: Output) -> Iterator[Path]:
    """Yield a temporary folder for a model. When the block ends without an error, the old model is removed, the names
    of the new files are recorded, and the new files are moved to the output folder."""
    saved = partial(output.path / "model")
    remove(saved)  # a killed process may have left it, with safetensors' temporary files
    saved.mkdir()
    yield saved
    set_modes(saved)
    output.begin(*(path.name for path in sorted(saved.iterdir())))
    for path in files_in(saved):
        place = output.path / path.relative_to(saved)
        for folder in reversed(path.relative_to(saved).parents):
            if (output.path / folder).is_symlink():  # through a link, files would be written to another folder
                remove(output.path / folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    remove(saved)


def files_in(path: Path) -> list[Path]:
    """Return all files and links in a folder and its subfolders. For any other path, return the path itself."""
    if path.is_symlink() or not path.is_dir():
        return [path]
    return [Path(root, name) for root, _, names in os.walk(path) for name in names]


def beside(path: Path, suffix: str) -> Path:
    """Append a suffix to the name of a file, as in `OUTPUT.json`."""
    return path.with_name(path.name + suffix)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
