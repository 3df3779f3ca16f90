"""This process among those that torchrun or accelerate started."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """(number of this process, how many there are); (0, 1) for one that was started alone. ValueError where the
    environment's numbers do not fit together."""
    rank, world = from_environment("RANK", 0), from_environment("WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise ValueError(f"the environment says that this is process {rank} of {world} (RANK, WORLD_SIZE)")
    return rank, world


def from_environment(name: str, default: int) -> int:
    """A number that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK; the default for a process that was started alone."""
    value = os.environ.get(name) or default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a number, got {value!r}") from None


def on_rank_zero(work: Callable[[], T]) -> T:
    """What `work` returns in process 0, in every process of a group. Where it fails, process 0 raises its error, and
    the others leave with SystemExit: an error is reported once."""
    rank, world = rank_and_world()
    if world == 1:
        return work()
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError(f"this is process {rank} of {world}, but there is no process group: start them by torchrun")
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
    """Leave the process group, if there is one. gloo's threads now and then abort a process that ends within it
    (pytorch issue 190489)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def print_on_rank_zero() -> Iterator[None]:
    """In this block only process 0 prints."""
    if rank_and_world()[0] == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
