"""Outputs of jobs: check whether an output is finished, compare its settings, overwrite it, and resume work.

An output is a file or a folder with a *record*, a JSON file: OUTPUT.json next to a file, OUTPUT/made_from.json in a
folder. The record has the settings (everything that determines the result, as plain values) and, once the output is
finished, the result. Unfinished work for a file is stored in OUTPUT.parts/DIGEST/, where DIGEST is computed from
the settings, so that other settings never use it. A file without a record was not written by raoe: it is not replaced.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest, file_digest, versions
from raoe_train.artifacts.writing import partial, read_json, replacing, set_modes, write_json, write_text

logger = logging.getLogger(__name__)
Item = TypeVar("Item")

MADE_FROM = "made_from.json"  # record of a folder
NO_WORK = (MADE_FROM, "recipe.yaml", "initial")  # files of a run that has no work to resume
BESIDE = (".json", ".parts", ".failed.jsonl", ".examples.npz")  # suffixes of paths beside an output file
SETTINGS, FINISHED, FILES = "settings", "finished", "files"  # keys of a record
SHARD = 4096  # sentences or pairs per shard; a killed process loses at most one shard
SUM = ".sha256"  # suffix of the file with a shard's digest
POLL = 0.2  # seconds between checks for the work of other processes


def beside(path: Path, suffix: str) -> Path:
    """Append a suffix to a path, as in `OUTPUT.json`."""
    return path.with_name(path.name + suffix)


class Output:
    """One output of a job.

    Args:
        path: the file, or the folder if `folder` is True. Links are followed.
        settings: everything that determines the result (nested settings and digests of inputs), as plain values.
        overwrite: whether to replace an output that was made with other settings.
        folder: whether the output is a folder. Only files that its record lists are ever removed.
        own_record: whether the output is a JSON file that is its own record.
        defaults: {dotted key: default}. If an older record lacks a setting, the default is assumed.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], overwrite: bool = False, *, folder: bool = False,
        own_record: bool = False, defaults: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.user_path = Path(path).expanduser().resolve(), str(path)
        self.settings = json.loads(json.dumps(settings))  # convert to JSON's types, to compare with a record
        self.overwrite, self.folder = overwrite, folder
        self.record = self.path if own_record else self.path / MADE_FROM if folder else beside(self.path, ".json")
        self.all_parts = beside(self.path, ".parts")
        self.defaults = json.loads(json.dumps(defaults or {}))
        self.parts = self.all_parts / digest(explicit(self.settings, self.defaults))[:16]

    def finished(self, say: bool = False) -> dict[str, Any] | None:
        """Return the result if the output is finished and has these settings, or None if the work may start or resume.
        With `say`, print how to repeat finished work.

        Raises:
            ValueError: the path is a folder instead of a file (or the reverse), the output has no record, or its
                record has other settings and `overwrite` is False.
        """
        if self.path.exists() and self.path.is_dir() != self.folder:
            raise ValueError(f"output {self.path} is a {'folder' if self.path.is_dir() else 'file'}: choose another")
        record = read_json(self.record)
        changed = self._changed(record)
        if not changed and record.get(FINISHED) and self._exists():
            for left in (self.all_parts, self.path.with_name(f".{self.path.name}.finish.lock")):
                remove(left)  # left by a killed process
            if say:
                print(f"{self.user_path} is finished with these settings; to repeat the work, remove it")
            return {key: value for key, value in record.items() if key not in (FINISHED, FILES)}
        if SETTINGS not in record and (self._exists() or self.record.exists()):
            raise ValueError(f"output {self.path} exists and was not written by raoe-train: choose another output")
        if changed and SETTINGS in record and self._exists() and not self.overwrite:
            raise ValueError(
                f"output {self.path} was made with other settings or inputs (different: {', '.join(changed)}): "
                "choose another output, or replace it with --overwrite"
            )
        return None

    @property
    def replaces(self) -> bool:
        """Whether `begin` removes an output that was made with other settings."""
        record = read_json(self.record)
        return SETTINGS in record and bool(self._changed(record))

    def _changed(self, record: Mapping[str, Any]) -> list[str]:
        """Return the dotted keys of the settings in which a record differs from this output."""
        return different(explicit(record.get(SETTINGS), self.defaults), explicit(self.settings, self.defaults))

    def begin(self, *files: str) -> None:
        """Write the record; call this right before writing the output. If the record of a folder is finished or has
        other settings, remove the files that it names. `files`: files in the folder that a later run may remove."""
        record = read_json(self.record)
        if record.get(FINISHED) or self._changed(record):
            if self.folder:
                if FINISHED in record:  # before removing files: a killed process must leave no finished record
                    write_json(self.record, {**record, FINISHED: False})
                for path in (self.path / name for name in record.get(FILES, [])):
                    if self.path in path.parent.resolve().joinpath(path.name).parents:  # only inside the folder
                        remove(path)
                        with suppress(OSError):  # raised for a folder that is not empty
                            os.removedirs(path.parent)
            record = {SETTINGS: self.settings}
        names = dict.fromkeys([*record.get(FILES, []), *files])
        write_json(self.record, {**record, FILES: [*names]})

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the record of a complete output (result, settings, versions), and remove unfinished work."""
        record = {"output": self.user_path, **result, SETTINGS: self.settings, "versions": versions()}
        names = read_json(self.record).get(FILES, [])  # expand folders to their files: users may add files later
        files = [str(path.relative_to(self.path)) for name in names for path in _files(self.path / name)]
        write_json(self.record, {**record, FINISHED: True, FILES: files})
        shutil.rmtree(self.all_parts, ignore_errors=True)
        return record

    def finish_lock(self) -> AbstractContextManager[None]:
        """Return a lock for a `with` block. Only one process can enter the block at a time; other processes wait."""
        # not in the parts folder, which is removed when a process finishes the output
        return lock_output(beside(self.path, ".finish"), wait=True)

    def wait(self) -> dict[str, Any]:
        """Wait for another process to finish the output, and return the result."""
        while not (result := self.finished()):
            time.sleep(POLL)
        return result

    def _exists(self) -> bool:
        """Whether the file exists, or the folder has any content besides a record."""
        if self.path.is_dir():
            return any(path not in (self.record, partial(self.record)) for path in self.path.iterdir())
        return self.path.exists()


@contextmanager
def lock_output(path: str | Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock file next to an output during the `with` block. The lock is released if the process dies. If another
    process holds the lock, wait if `wait` is True, else raise ValueError. All links to an output share its lock."""
    path = Path(path).expanduser().resolve()
    lock_file = path.with_name(f".{path.name}.lock")
    new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_file, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another process is writing to {path}: wait, or choose another output") from None
    try:
        yield
    finally:
        record = read_json(path / MADE_FROM)
        if SETTINGS in record and not record.get(FINISHED) and not any(map(_is_work, path.iterdir())):
            remove(path)  # the job failed before it wrote any work to resume
        lock_file.unlink(missing_ok=True)
        lock.release()
        for folder in new_folders:
            with suppress(OSError):  # raised for a folder that is not empty, and for a file
                folder.rmdir()


@contextmanager
def replacing_model(output: Output) -> Iterator[Path]:
    """Yield a temporary folder for a model. When the block ends without an error, an old model is removed, the record
    gets the names of the new files, and the new files move to the output folder."""
    saved = partial(output.path / "model")
    remove(saved)  # a killed process may have left it, with safetensors' temporary files
    saved.mkdir()
    yield saved
    set_modes(saved)
    output.begin(*(path.name for path in sorted(saved.iterdir())))
    for path in _files(saved):
        place = output.path / path.relative_to(saved)
        for folder in reversed(path.relative_to(saved).parents):
            if (output.path / folder).is_symlink():  # through a link, files would be written to another folder
                remove(output.path / folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    remove(saved)


def _is_work(path: Path) -> bool:
    """Whether a path in an unfinished output has work to resume, a non-empty log, or files that raoe did not write."""
    is_empty_log = path.name == "log.jsonl" and path.stat().st_size == 0
    return path.name not in NO_WORK and not is_empty_log and bool(_files(path))


def _files(path: Path) -> list[Path]:
    """Return all files and links in a folder and its subfolders; for any other path, the path itself."""
    if path.is_symlink() or not path.is_dir():
        return [path]
    return [Path(root, name) for root, _, names in os.walk(path) for name in names]


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def different(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Return the dotted keys in which two nested settings differ. A missing key differs from a null value."""
    if isinstance(old, dict) and isinstance(new, dict):
        missing = [f"{prefix}{key}" for key in new.keys() ^ old.keys()]
        nested = (different(old[key], new[key], f"{prefix}{key}.") for key in new if key in old)
        return sorted([*missing, *(key for keys in nested for key in keys)])
    return [] if type(old) is type(new) and old == new else [prefix.rstrip(".") or "all"]


def explicit(settings: Any, defaults: Mapping[str, Any], prefix: str = "") -> Any:
    """Return nested settings without default values and without empty sections, so that settings that a later version
    of raoe adds do not affect comparisons. `defaults` is {dotted key: default}."""
    if not isinstance(settings, dict):
        return settings
    result = {}
    for key, value in settings.items():
        value = explicit(value, defaults, f"{prefix}{key}.")
        if value != {} and different(defaults.get(prefix + key, ...), value):
            result[key] = value
    return result


def share(folder: Path, items: Sequence[Item], size: int, make: Callable[[Any], np.ndarray], name: str) -> list[Path]:
    """Write this process's share of the missing shards, and return the paths of all shards, for `gather`. Each shard is
    the result of `make` for `size` items, and does not depend on the number of processes."""
    rank, world = rank_and_world()
    paths = [folder / f"{number:06d}.npy" for number in range(-(-len(items) // size))]
    missing = [number for number in range(rank, len(paths), world) if not _sound(paths[number])]
    for number in tqdm(missing, desc=name, unit="shard", disable=None):
        if paths[number].exists():
            logger.warning("%s is damaged: computing it again", paths[number])
        with replacing(paths[number]) as temporary:
            np.save(temporary, make(items[number * size : (number + 1) * size]))
            write_text(beside(paths[number], SUM), file_digest(temporary))  # before the shard: a shard needs a digest
    return paths


def gather(paths: Sequence[Path]) -> np.ndarray:
    """Wait until all processes have written their shards, and return all shards, concatenated."""
    for path in paths:
        while not _sound(path):
            time.sleep(POLL)
    return np.concatenate([np.load(path) for path in paths])


def _sound(shard: Path) -> bool:
    """Whether a shard exists and is undamaged."""
    digest_file = beside(shard, SUM)
    return shard.exists() and digest_file.exists() and file_digest(shard) == digest_file.read_text(encoding="utf-8")


class SharedRows:
    """Rows that several processes write. Each row is a JSON file in the parts folder of an output.

    A file is replaced atomically, so a killed process loses no written row. Processes never wait for each other: the
    last process to finish merges all rows. Rows with a "reason" are failures and go to OUTPUT.failed.jsonl.
    """

    def __init__(self, output: Output) -> None:
        self.output, self.failed = output.path, beside(output.path, ".failed.jsonl")
        self.folder = output.parts

    def read(self) -> dict[int, dict[str, Any]]:
        """Return {id: row} of the rows of all processes. A damaged file counts as missing."""
        rows = {int(path.stem): read_json(path) for path in self.folder.glob("[0-9]*.json")}
        return {key: row for key, row in rows.items() if row}

    def write(self, key: int, row: Mapping[str, Any]) -> None:
        """Write a row, or replace it."""
        write_json(self.folder / f"{key}.json", row)

    def merge(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write finished rows to the output and failed rows to OUTPUT.failed.jsonl, in the given order."""
        count = 0
        with replacing(self.output) as output, replacing(self.failed) as failed:
            with open(output, "w", encoding="utf-8") as good, open(failed, "w", encoding="utf-8") as bad:
                for row in rows:
                    count += "reason" in row
                    (bad if "reason" in row else good).write(json.dumps(row, ensure_ascii=False) + "\n")
        if not count:
            self.failed.unlink()
