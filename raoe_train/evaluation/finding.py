"""Where a task's data is: a source of its own, a file in data.dir, or SentEval's folders there."""

from __future__ import annotations

import os
from pathlib import Path

from raoe_train.config import nearest
from raoe_train.data.files import data_kind, read_rows
from raoe_train.data.senteval import senteval_splits
from raoe_train.data.sources import BUILTIN, Source, is_file

ALL_PAIRS = "-all"
TRAIN = "train"
TEST = "test"


class NoSuchTask(ValueError):
    """A name that nothing in data.dir has."""


def find_source(
    task: str, data_dir: str | Path | None, kind: str = "sts", *, whole: bool = False
) -> str | list[Source]:
    """What find_task finds, or the same of SentEval's folders in data_dir, as open Sources."""
    try:
        return find_task(task, data_dir, kind, whole=whole)
    except NoSuchTask:
        name, _, split = task.partition("#")
        splits = senteval_splits(Path(data_dir or "").expanduser(), name.removesuffix(ALL_PAIRS).lower())
        if not data_dir or splits is None:
            raise
    if split and split not in splits:
        raise ValueError(f"task {task!r}: SentEval's {name} has no split {split!r}; it has {', '.join(splits)}")
    if not split and (whole or name.endswith(ALL_PAIRS) or TEST not in splits):
        return [source for its in splits.values() for source in its]
    return splits[split or TEST]


def find_task(task: str, data_dir: str | Path | None, kind: str = "sts", *, whole: bool = False) -> str:
    """The source that NAME, NAME#SPLIT or NAME-all stands for; a source stands for itself.

    NAME is the file data_dir/NAME.* or data_dir/KIND/NAME.*, else data_dir/*/NAME.*, and its test split where it has
    splits and is not to be `whole`. NoSuchTask where nothing is there, ValueError for more than one file.
    """
    name, _, split = task.partition("#")
    if is_file(name) or name in BUILTIN or name.startswith("hub:") or os.path.exists(task):
        return task
    if not data_dir:
        raise NoSuchTask("data.dir is missing: the folder where tasks are looked up by name")
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {str(folder)!r} (data.dir)")
    near, all_files = _files(folder, "*", f"{kind}/*"), _files(folder, "*", "*/*")

    def named(base: str) -> list[Path]:
        return near.get(base.lower()) or all_files.get(base.lower(), [])

    files = named(name)
    if not files and name.endswith(ALL_PAIRS):
        files, whole = named(name.removesuffix(ALL_PAIRS)), True
    if not files:
        raise NoSuchTask(
            f"no task {task!r} in {folder}{nearest(repr(name), map(repr, all_files))}: neither {name}.* nor "
            f"*/{name}.*; there are: {', '.join(sorted(all_files))}"
        )
    if len(files) > 1:
        raise ValueError(f"task {task!r} could be {' or '.join(map(str, files))}; name the file instead")
    file = str(files[0])
    if split:
        return f"{file}#{split}"
    splits: dict[str, None] = {}
    for _, fields in [] if whole else read_rows(file):
        if isinstance(fields, dict) and "split" in fields:
            splits[str(fields["split"])] = None
            if TEST in splits:  # whatever others come after
                return f"{file}#{TEST}"
    if len(splits) > 1:
        listed = ", ".join(splits)
        raise ValueError(f"{file} has splits {listed} and none is {TEST!r}; name {file}#SPLIT or {task}{ALL_PAIRS}")
    return file


def _files(folder: Path, *places: str) -> dict[str, list[Path]]:
    """The data files at these places in a folder, by their names in small letters."""
    found: dict[str, list[Path]] = {}
    for path in sorted(path for place in places for path in folder.glob(place)):
        if data_kind(path) and path.is_file():
            found.setdefault(Path(path.name.removesuffix(".gz")).stem.lower(), []).append(path)
    return found
