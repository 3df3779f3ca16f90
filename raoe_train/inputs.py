"""Record what determines a job's result: its settings, and digests of the files and models named in the settings."""

import dataclasses
import functools
import hashlib
import os
import pkgutil
from pathlib import Path
from typing import Any

from raoe_train.config import OTHERS, UNRECORDED, Choice, hints_of, marked_as
from raoe_train.data.files import data_kind
from raoe_train.data.sources import file_and_split, is_file, pool
from raoe_train.outputs import digest, read_json

# import paths as strings, because the task modules import this module
TASK_SOURCE, SUITE_TASKS = "raoe_train.evaluation.tasks:source_of", "raoe_train.evaluation.tasks:suite_tasks"
# files in the folder of a run or a model that do not affect its embeddings
METADATA = ("README.md", "recipe.yaml", "made_from.json", "metrics.json", "log.jsonl", "run.png")
EVENTS = "events.out.tfevents."  # prefix of TensorBoard's file names


def recorded(section: Any, data_dir: str | None = None, *, digests: bool = True) -> dict[str, Any]:
    """Return the settings of a configuration object, or of one of its sections, that determine a result.

    Settings with their default values are left out, so that earlier records stay valid when a later version adds a
    setting. Digests replace the paths of files and folders, so that a record depends on the content of a file, not on
    its path. Without `digests`, the paths are kept. `data_dir` is the folder in which tasks are looked up by name.
    """
    data_dir = getattr(getattr(section, "data", None), "dir", data_dir)
    defaults, result = type(section)(), dict[str, Any]()
    for name, hint in hints_of(type(section)).items():
        value, default = getattr(section, name), getattr(defaults, name)
        if isinstance(value, Choice):
            value, default = dataclasses.asdict(value), dataclasses.asdict(default)
        if value == default or any(marked_as(hint, each) for each in (UNRECORDED, "written file", "written folder")):
            continue
        if dataclasses.is_dataclass(value):
            value = recorded(value, data_dir, digests=digests)
            if not value and default is not None:  # only settings that do not affect the result
                continue
        elif name == OTHERS:
            result |= value
            continue
        elif digests:
            value = _with_digests(value, hint, data_dir)
        result[name] = value
    return result


def _with_digests(value: Any, hint: Any, data_dir: str | None) -> Any:
    """Replace the name of each input with a digest of its content. Keep task names, because results contain them."""
    if marked_as(hint, "suite"):
        value = pkgutil.resolve_name(SUITE_TASKS)(value)
    if marked_as(hint, "suite") or marked_as(hint, "task"):
        return [[word, _task_digest(word, data_dir)] for word in value]
    if not marked_as(hint, "read"):
        return value
    of = _data_digest if marked_as(hint, "rows") else digest_of
    return of(value) if isinstance(value, str) else [of(name) for name in value]


def _data_digest(source: str) -> Any:
    """Return a record that identifies the rows of a data source: for a file, its digest, format and split."""
    parts: list[Any] = []
    for part in pool(source):
        if os.path.isdir(part.partition("#")[0]) or not is_file(part):
            base, mark, split = part.partition("#")
            parts.append(digest_of(base) + mark + split)
        else:
            path, split = file_and_split(part)
            parts.append([file_digest(path), data_kind(path), split])
    return parts


def _task_digest(word: str, data_dir: str | None) -> Any:
    """Return the record that identifies a task's data (see _data_digest), or None for an unknown task."""
    source = pkgutil.resolve_name(TASK_SOURCE)(word, data_dir)
    return source and _data_digest(source)


def digest_of(name: str) -> str:
    """Return the digest of a local file or model folder, or the name itself if it is not local (such as a hub name)."""
    path = Path(name).expanduser()
    if not name or not os.path.exists(path):  # Path.exists raises an error for very long names
        return name
    if path.is_dir():
        return fingerprint(str(path))
    return file_digest(path) if path.is_file() else name  # a pipe or a device has no end


def fingerprint(folder: str) -> str:
    """Return a digest of a local model folder: its file names, file contents (links are followed) and, for an adapter,
    its base model. The digest changes when the model is trained again, but not when the folder is moved."""
    digests, seen = dict[str, str](), set[str]()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()  # skip a link back to a parent folder
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]  # such as .git and .cache
        for path in (Path(root, name) for name in names if name not in METADATA):
            place = path.relative_to(folder).as_posix()
            if not path.name.startswith((".", EVENTS)) and path.is_file():
                digests[place] = file_digest(path)
            if path.name in ("adapter_config.json", "config.json"):
                config = read_json(path)
                base = str(config.get("base_model_name_or_path") or config.get("base_model") or "")
                if base and Path(base).resolve() != Path(folder).resolve():
                    digests[f"base of {place}"] = digest_of(base)
    return digest(sorted(digests.items()))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal. An unchanged file is read only once."""
    state = path.stat()
    return _sha256(path.resolve(), state.st_ctime_ns, state.st_size)


@functools.lru_cache(maxsize=4096)
def _sha256(path: Path, *_: int) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()
