"""Arrays that one or more processes compute in parts, so that interrupted work can resume."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.outputs import PATIENCE, POLL, replacing
from raoe_train.processes import rank_and_world

SHARD = 4096  # sentences or pairs in a part; a killed process loses at most one part


def write_parts(
    folder: Path, items: Sequence[Any], make: Callable[[Any], np.ndarray], name: str, size: int = 0, sync: bool = False
) -> list[Path]:
    """Compute an array in parts: write this process's share of the missing parts, and return the paths of all parts.
    Rank 0 waits for the other processes and, after a timeout (PATIENCE), computes the parts that are still missing.

    Args:
        folder: folder for finished parts, from which an interrupted job resumes.
        items: what to compute the array from; the same items in all processes.
        make: function that returns the array's rows for some of the items.
        name: label of rank 0's progress bar, which counts the parts of all processes.
        size: number of items in a part, by default SHARD. The parts do not depend on the number of processes.
        sync: whether all processes, not only rank 0, wait until all parts exist.
    """
    from tqdm import tqdm  # here, because the command line sets variables that tqdm reads at import

    (rank, world), size = rank_and_world(), size or SHARD
    # parts of another size have other names
    paths = {start: folder / f"{start:09d}+{size}.npy" for start in range(0, len(items), size)}
    names = {path.name for path in paths.values()}

    def finished() -> set[str]:
        return names.intersection(os.listdir(folder)) if folder.exists() else set()

    made = finished()
    own = [start for number, start in enumerate(paths) if number % world == rank]
    missing = [start for start in own if paths[start].name not in made]
    if len(missing) < len(own):
        print(f"{name}: resuming after {len(made)} of {len(paths)} parts", flush=True)
    is_silent = rank > 0 or len(paths) == 1
    with tqdm(desc=name, unit="part", total=len(paths), initial=len(made), disable=is_silent) as bar:

        def show() -> None:
            if not is_silent:
                bar.update(len(finished()) - bar.n)

        def write(start: int) -> None:
            with replacing(paths[start]) as temporary:
                np.save(temporary, make(items[start : start + size]))
            show()

        for start in missing:
            write(start)
        deadline = time.monotonic() + PATIENCE * (rank + 1)  # rank 0 stops waiting first
        # from the end, because slow processes are still at the start
        for start in reversed(paths) if rank == 0 or sync else ():
            while not paths[start].exists() and time.monotonic() < deadline:
                time.sleep(POLL)
                show()
            if not paths[start].exists():
                write(start)
    return [*paths.values()]


def read_parts(paths: Sequence[Path]) -> np.ndarray:
    """Join all parts into one array. (`np.concatenate` would also keep the separate parts in memory.)"""
    parts, end = [np.load(path, mmap_mode="r") for path in paths], 0
    whole = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    while parts:
        part = parts.pop(0)
        whole[end : (end := end + len(part))] = part
    return whole
