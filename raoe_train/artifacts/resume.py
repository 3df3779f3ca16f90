"""Outputs of jobs: whether one is finished, what it was made from, what of it may be overwritten, where work resumes.

An output is a file or a folder with a *record*, a JSON file of ours: OUTPUT.json beside a file, OUTPUT/made_from.json
in a folder. The record holds the settings, all that the result depends on as plain values, and, once the output is
finished, the result. Unfinished work for a file lies in OUTPUT.parts/, in a folder of its settings' digest, so that it
never mixes with others'. What has no record was not written by us, and is never replaced.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest, file_digest, versions
from raoe_train.artifacts.writing import partial, read_json, replacing, write_json, write_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")

MADE_FROM = "made_from.json"  # record of a folder
SETTINGS, FINISHED, FILES = "settings", "finished", "files"  # keys of a record
SHARD = 4096  # sentences, or as many pairs: what a kill can cost
SUM = ".sha256"  # suffix of the file with a shard's digest
POLL = 0.2  # seconds


def beside(path: Path, suffix: str) -> Path:
    """PATH + suffix: `OUTPUT.json`, say."""
    return path.with_name(path.name + suffix)


class Output:
    """One output of a job.

    Args:
        path: the file, or the folder where `folder` is True. Links are followed.
        settings: all that the result depends on, as plain values: nested settings, digests of what they name.
        overwrite: whether an output of other settings may be replaced.
        folder: whether it is a folder. Of its files only those that the record names are ever removed.
        own_record: whether the output, a JSON file, is its own record.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        overwrite: bool = False,
        *,
        folder: bool = False,
        own_record: bool = False,
    ) -> None:
        self.path, self.given = Path(path).expanduser().resolve(), str(path)
        self.settings = json.loads(json.dumps(settings))  # as a record has them
        self.overwrite, self.folder = overwrite, folder
        self.record = self.path if own_record else self.path / MADE_FROM if folder else beside(self.path, ".json")
        self.all_parts = beside(self.path, ".parts")
        self.parts = self.all_parts / digest(self.settings)[:16]

    def finished(self) -> dict[str, Any] | None:
        """The result, where the output is finished and of these settings; None where the work may begin or resume.

        Raises:
            ValueError: something else is in the way: files that have no record of ours, or an output of other settings
                without `overwrite`.
        """
        if self.path.exists() and self.path.is_dir() != self.folder:
            raise ValueError(f"output {self.path} is {'a folder: name a file' if self.path.is_dir() else 'a file'}")
        found = read_json(self.record)
        changed = different(found.get(SETTINGS), self.settings)
        if not changed and found.get(FINISHED) and self._there():
            shutil.rmtree(self.all_parts, ignore_errors=True)  # left by a kill
            return {key: value for key, value in found.items() if key not in (FINISHED, FILES)}
        if SETTINGS not in found and (self._there() or self.record.exists()):
            raise ValueError(f"output {self.path} exists and was not written by raoe-train: choose another output")
        if changed and SETTINGS in found and self._there() and not self.overwrite:
            raise ValueError(
                f"output {self.path} exists and is of other settings or inputs (different: {', '.join(changed)}): "
                "choose another output, or --overwrite it"
            )
        return None

    @property
    def replaces(self) -> bool:
        """Whether beginning removes something of other settings."""
        found = read_json(self.record)
        return SETTINGS in found and bool(different(found[SETTINGS], self.settings))

    def begin(self, *files: str) -> None:
        """Make the output ours, with these settings, right before it is written. In a folder, what we wrote of other
        settings goes; `files` are the names that are ours there, which `overwrite` may remove."""
        found = read_json(self.record)
        if found.get(FINISHED) or different(found.get(SETTINGS), self.settings):
            if self.folder:
                if FINISHED in found:  # a kill while its files go leaves none that is finished
                    write_json(self.record, {**found, FINISHED: False})
                for path in (self.path / name for name in found.get(FILES, [])):
                    if self.path in path.parent.resolve().joinpath(path.name).parents:  # a name could lead elsewhere
                        remove(path)
                        with suppress(OSError):  # folders that are not empty: the last is ours, with the record
                            os.removedirs(path.parent)
            found = {SETTINGS: self.settings}
        write_json(self.record, {**found, FILES: [*dict.fromkeys([*found.get(FILES, []), *files])]})

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write, and return, the record of an output that is whole: the result, the settings, versions. Unfinished work
        is removed."""
        found = {"output": self.given, **result, SETTINGS: self.settings, "versions": versions()}
        names = read_json(self.record).get(FILES, [])  # of folders each file: a user's may lie beside it
        files = [str(path.relative_to(self.path)) for name in names for path in _files(self.path / name)]
        write_json(self.record, {**found, FINISHED: True, FILES: files})
        shutil.rmtree(self.all_parts, ignore_errors=True)
        return found

    def alone(self) -> AbstractContextManager[None]:
        """A block in which no other process is that asks for it, too; they wait."""
        # not among the parts, which a process that finishes removes
        return owned(beside(self.path, ".finish"), wait=True)

    def awaited(self) -> dict[str, Any]:
        """The result that another process is about to finish."""
        while not (result := self.finished()):
            time.sleep(POLL)
        return result

    def _there(self) -> bool:
        """Whether there is a file, or in a folder anything but a record."""
        if self.path.is_dir():
            return any(path not in (self.record, partial(self.record)) for path in self.path.iterdir())
        return self.path.exists()


@contextmanager
def owned(path: str | Path, wait: bool = False) -> Iterator[None]:
    """In this block no other process has the output, by a lock file beside it that goes with the process; ValueError
    where one has, unless it is to `wait`. Links are followed: two names of one output are one lock."""
    path = Path(path).expanduser().resolve()
    lock_file = path.with_name(f".{path.name}.lock")
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_file, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{path}: another process is writing to it; wait, or choose another output") from None
    try:
        yield
    finally:
        lock_file.unlink(missing_ok=True)
        lock.release()


@contextmanager
def replacing_model(output: Output) -> Iterator[Path]:
    """A folder to save a model in: when the block ends well, its files and folders move to an output folder, whose
    record has their names before. Not before then another model goes that is there."""
    saved = partial(output.path / "model")
    remove(saved)  # a killed process's: safetensors' temporary files have another name each time
    saved.mkdir()
    yield saved
    found = sorted(saved.iterdir())
    output.begin(*(path.name for path in found))
    for path in _files(saved):
        place = output.path / path.relative_to(saved)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    remove(saved)


def _files(path: Path) -> list[Path]:
    """The files in a folder and its folders, links among them; of anything else itself."""
    if path.is_symlink() or not path.is_dir():
        return [path]
    return [Path(root, name) for root, _, names in os.walk(path) for name in names]


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def different(old: Any, new: Any, where: str = "") -> list[str]:
    """The dotted keys in which two nested settings differ; a key that is missing differs from one that is null."""
    if isinstance(old, dict) and isinstance(new, dict):
        missing = [f"{where}{key}" for key in new.keys() ^ old.keys()]
        both = (different(old[key], new[key], f"{where}{key}.") for key in new if key in old)
        return sorted([*missing, *(key for keys in both for key in keys)])
    return [] if type(old) is type(new) and old == new else [where.rstrip(".") or "all"]


def share(folder: Path, items: Sequence[Item], size: int, make: Callable[[Any], np.ndarray], name: str) -> list[Path]:
    """Write this process's share of the shards: `make` of each run of `size` items, unless the shard exists. The paths
    of all shards, for `gathered`. What a shard holds does not depend on how many processes there are."""
    rank, world = rank_and_world()
    paths = [folder / f"{number:06d}.npy" for number in range(-(-len(items) // size))]
    missing = [number for number in range(rank, len(paths), world) if not _sound(paths[number])]
    for number in tqdm(missing, desc=name, unit="shard", disable=None):
        if paths[number].exists():
            logger.warning("%s is damaged and is made again", paths[number])
        with replacing(paths[number]) as temporary:
            np.save(temporary, make(items[number * size : (number + 1) * size]))
            write_text(beside(paths[number], SUM), file_digest(temporary))  # first: no shard is there without its sum
    return paths


def gathered(paths: Sequence[Path]) -> np.ndarray:
    """The shards of all processes, concatenated. Waits for those of the other processes."""
    for path in paths:
        while not _sound(path):
            time.sleep(POLL)
    return np.concatenate([np.load(path) for path in paths])


def _sound(shard: Path) -> bool:
    """Whether a shard is there with the very bytes that were written."""
    its_sum = beside(shard, SUM)
    return shard.exists() and its_sum.exists() and file_digest(shard) == its_sum.read_text(encoding="utf-8")


class Lines:
    """JSON lines by "id" that several processes write, each to a file of its own among the parts of an output.

    Each line is flushed to the disk: a kill leaves whole lines and at most the beginning of one more, which the next
    run cuts off. No process waits for another: whichever ends last merges all lines. Lines with a "reason" are the
    refused ones, and go to OUTPUT.failed.jsonl.
    """

    def __init__(self, output: Output) -> None:
        self.output, self.failed = output.path, beside(output.path, ".failed.jsonl")
        self.folder = output.parts
        self.own = self.folder / f"rank-{rank_and_world()[0]:05d}.jsonl"
        self._file: Any = None

    def done(self) -> set[int]:
        """The ids of all lines on disk, of every process."""
        return set(self._all())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """In this block lines can be written; ValueError where another process writes this process's."""
        with owned(self.own), open(self.own, "ab") as self._file:
            self._file.truncate(sum(len(line) for _, line in _whole_lines(self.own)))
            yield

    def write(self, line: dict[str, Any]) -> None:
        """Put a line on disk."""
        self._file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def merge(self, ids: Sequence[int], brief: Callable[[dict[str, Any]], T]) -> tuple[list[T], list[T]] | None:
        """Write the output, in the order of `ids`: what `brief` makes of each good line, and of each refused one. None
        while other processes' lines are missing."""
        lines = self._all()
        if any(key not in lines for key in ids):
            return None
        briefs: tuple[list[T], list[T]] = ([], [])
        with replacing(self.output) as output, replacing(self.failed) as failed:
            with open(output, "wb") as good, open(failed, "wb") as bad:
                for key in ids:
                    fields = json.loads(lines[key])
                    refused = "reason" in fields
                    (bad if refused else good).write(lines[key])
                    briefs[refused].append(brief(fields))
        if not briefs[True]:
            self.failed.unlink()
        return briefs

    def _all(self) -> dict[int, bytes]:
        """{id: its line}, of every process."""
        return {key: line for path in sorted(self.folder.glob("rank-*.jsonl")) for key, line in _whole_lines(path)}


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(id, line) of each line but for the beginning of one that a kill left at the end. ValueError for one that is not
    ours."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            yield json.loads(line)["id"], line + b"\n"
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number}: not a line that we wrote; was the file changed?") from None
