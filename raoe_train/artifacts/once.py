"""What takes long is made once, survives a kill, and is found again: the one way in which all jobs do so."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest, file_digest, versions
from raoe_train.artifacts.writing import read_json, replacing, write_json, write_text

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

SHARD = 4096  # sentences, or as many pairs: what a kill can cost
SUM = ".sha256"  # suffix of the file with a shard's digest
POLL = 0.2  # seconds


def beside(output: Path, suffix: str) -> Path:
    """OUTPUT + suffix: `OUTPUT.json`, the summary of what OUTPUT was made from, or `OUTPUT.parts`, unfinished work."""
    return output.with_name(output.name + suffix)


def parts(output: Path, settings: dict[str, Any]) -> Path:
    """The folder of unfinished work for an output of these settings: work for others never mixes with it."""
    return beside(output, ".parts") / digest(settings)[:16]


def found(
    output: Path, settings: dict[str, Any], overwrite: bool, summary: Path | None = None
) -> dict[str, Any] | None:
    """The result in `summary`, by default OUTPUT.json, if `output` is there and was made with these settings, which are
    plain values, all that it depends on; None if nothing is in the way.

    ValueError for an output of other settings without `overwrite`. Where there is unfinished work of these settings
    `overwrite` was said before, or the output is theirs and a kill kept it from being summed up.
    """
    if output.is_dir():
        raise ValueError(f"output {output} is a folder: name a file")
    if not output.exists():
        return None
    result = read_json(summary or beside(output, ".json"))
    if result.get("settings") == settings:
        shutil.rmtree(beside(output, ".parts"), ignore_errors=True)  # what a kill left
        return result
    if not overwrite and not parts(output, settings).exists():
        raise ValueError(f"output {output} is there already, not from these settings and inputs; overwrite replaces it")
    return None


def claim(output: Path, settings: dict[str, Any]) -> None:
    """To be said before `output` is written: should a kill keep it from being summed up, it is known for theirs."""
    parts(output, settings).mkdir(parents=True, exist_ok=True)


def finish(output: Path, settings: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Write, and give, OUTPUT.json beside an output that is whole: `result`, the settings, versions. Then all
    unfinished work for it goes."""
    result = {"output": str(output), **result, "settings": settings, "versions": versions()}
    write_json(beside(output, ".json"), result)
    shutil.rmtree(beside(output, ".parts"), ignore_errors=True)
    return result


def awaited(output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The result that another process, the first, is about to finish."""
    while not (result := found(output, settings, overwrite=True)):
        time.sleep(POLL)
    return result


def in_shards(
    folder: Path, items: Sequence[Item], size: int, make: Callable[[Any], np.ndarray], name: str
) -> list[np.ndarray]:
    """`make` of each run of `size` items, from `folder`, named for what they are made from, where it was made before.

    Under torchrun each process makes its own share and waits for the others'. What a shard holds does not depend on how
    many processes there are, so that a rerun may have more or fewer of them.
    """
    return gathered(share(folder, items, size, make, name))


def share(folder: Path, items: Sequence[Item], size: int, make: Callable[[Any], np.ndarray], name: str) -> list[Path]:
    """The files of all shards, see in_shards, of which this process's share is there and others may be missing."""
    rank, world = rank_and_world()
    paths = [folder / f"{number:06d}.npy" for number in range(-(-len(items) // size))]
    missing = [number for number, path in enumerate(paths) if number % world == rank and not _sound(path, warn=True)]
    for number in tqdm(missing, desc=name, unit="shard", disable=None):
        with replacing(paths[number]) as temporary:
            np.save(temporary, make(items[number * size : (number + 1) * size]))
            write_text(beside(paths[number], SUM), file_digest(temporary))  # first: no shard is there without its sum
    return paths


def _sound(shard: Path, warn: bool = False) -> bool:
    """Whether a shard is there with the very bytes that were written."""
    if not (shard.exists() and beside(shard, SUM).exists()):
        return False
    sound = file_digest(shard) == beside(shard, SUM).read_text(encoding="utf-8")
    if warn and not sound:
        logger.warning("%s is damaged, and is made anew", shard)
    return sound


def gathered(paths: Sequence[Path]) -> list[np.ndarray]:
    """The shards of all processes, which are waited for."""
    while not all(map(_sound, paths)):
        time.sleep(POLL)
    return [np.load(path) for path in paths]
