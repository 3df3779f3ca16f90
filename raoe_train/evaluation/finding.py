"""Where a task's data is: a source of its own, a file in data.dir, or SentEval's folders there."""

from __future__ import annotations

import os
from pathlib import Path

from raoe_train.data.files import data_kind, read_rows
from raoe_train.data.senteval import senteval_splits
from raoe_train.data.sources import BUILTIN, Source, is_file
from raoe_train.recipe import nearest

ALL_PAIRS = "-all"
TRAIN = "train"
TEST = "test"


class NoSuchTask(ValueError):
    """A name that nothing in data.dir has."""


def find_source(
    task: str, data_dir: str | Path | None, kind: str = "sts", *, whole: bool = False
) -> str | list[Source]:
    """What find_task finds; where data.dir has no such file, the same of SentEval's folders, as open Sources."""
    try:
        return find_task(task, data_dir, kind, whole=whole)
    except NoSuchTask:
        name, _, split = task.partition("#")
        every = whole or name.endswith(ALL_PAIRS)
        splits = senteval_splits(Path(str(data_dir)).expanduser(), name.removesuffix(ALL_PAIRS).lower())
        if splits is None:
            raise
    if split and split not in splits:
        raise ValueError(f"task {task!r}: SentEval's {name} has no split {split!r}; it has {', '.join(splits)}")
    chosen = [split] if split else list(splits) if every or TEST not in splits else [TEST]
    return [source for name in chosen for source in splits[name]]


def find_task(task: str, data_dir: str | Path | None, kind: str = "sts", *, whole: bool = False) -> str:
    """The source that a task stands for, which is NAME, NAME#SPLIT, NAME-all, or a source, which stands for itself.

    It is FILE#test where the file has a test split, FILE where it has one split or none, or where it shall be `whole`,
    as NAME-all is. NAME is the file data_dir/NAME.* or data_dir/KIND/NAME.*; where neither is there, data_dir/*/NAME.*.
    NoSuchTask where nothing is there, ValueError for more than one file, or splits of which none is "test".
    """
    name, _, split = task.partition("#")
    if is_file(name) or name in BUILTIN or name.startswith("hub:") or os.path.exists(task):
        return task
    if not data_dir:
        raise ValueError(f"data.dir is missing: the folder where task {task!r} is looked up")
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {str(folder)!r} (data.dir)")
    files = _named(folder, name, kind)
    if not files and name.endswith(ALL_PAIRS):
        files, whole = _named(folder, name.removesuffix(ALL_PAIRS), kind), True
    if not files:
        there = sorted({_name(path) for path in _files(folder, ("*", "*/*"))})
        raise NoSuchTask(
            f"no task {task!r} in {folder}{nearest(repr(name), map(repr, there))}: neither {name}.* nor */{name}.*; "
            f"there are: {', '.join(there)}"
        )
    if len(files) > 1:
        raise ValueError(f"task {task!r} could be {' or '.join(map(str, files))}; name the file instead")
    if split or whole:
        return f"{files[0]}#{split}" if split else str(files[0])
    splits: dict[str, None] = {}
    for _, fields in read_rows(files[0]):
        if isinstance(fields, dict) and "split" in fields:
            splits[str(fields["split"])] = None
            if TEST in splits:  # whatever others come after
                return f"{files[0]}#{TEST}"
    if len(splits) > 1:
        raise ValueError(
            f"{files[0]} has splits {', '.join(splits)} and none is {TEST!r}; "
            f"name {files[0]}#SPLIT or {task}{ALL_PAIRS}"
        )
    return str(files[0])


def _named(folder: Path, name: str, kind: str) -> list[Path]:
    for places in (("*", f"{kind}/*"), ("*/*",)):
        if files := [path for path in _files(folder, places) if _name(path).lower() == name.lower()]:
            return files
    return []


def _files(folder: Path, places: tuple[str, ...]) -> list[Path]:
    return sorted(path for place in places for path in folder.glob(place) if data_kind(path) and path.is_file())


def _name(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem
