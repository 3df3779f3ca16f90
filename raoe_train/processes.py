"""The processes that torchrun or accelerate started, and the rank of this process."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """Return (rank of this process, number of processes), or (0, 1) if neither torchrun nor accelerate is used. Raise
    ValueError if the environment variables contradict each other."""
    rank, world = from_environment("RANK", 0), from_environment("WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise ValueError(f"RANK must be from 0 to WORLD_SIZE - 1, but RANK is {rank} and WORLD_SIZE is {world}")
    return rank, world


def from_environment(name: str, default: int) -> int:
    """Return torchrun's environment variable `name` (RANK or WORLD_SIZE) as an int, or `default` if unset."""
    value = os.environ.get(name) or default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {value!r}") from None


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result in every process. If `work` fails, rank 0 raises the error, and the
    other processes raise SystemExit, so that the error is reported once."""
    rank, world = rank_and_world()
    if world == 1:
        return work()
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError(f"process {rank} of {world} has no process group: start all processes with torchrun")
    result: list[Any] = [None]
    try:
        if rank == 0:
            result = [(work(),)]
    finally:
        dist.broadcast_object_list(result, src=0)
    if result[0] is None:
        raise SystemExit(2)
    return result[0][0]


def end_group() -> None:
    """Destroy torch's process group, if there is one. If a group still exists when a process ends, gloo's threads may
    abort the process (pytorch issue 190489)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def print_on_rank_zero() -> Iterator[None]:
    """Print only on rank 0 while the `with` block (or the decorated function) runs."""
    if rank_and_world()[0] == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
