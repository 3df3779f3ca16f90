"""This process among those that torchrun, accelerate or mpirun started."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
# torchrun's and accelerate's, and those of MPICH and Intel, of Open MPI and of MVAPICH: the order is accelerate's.
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
WORLDS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def rank_and_world() -> tuple[int, int]:
    """(number of this process, how many there are); (0, 1) for one that was started alone. ValueError where the
    environment's numbers do not fit together."""
    rank, world = _first_of(RANKS, 0), _first_of(WORLDS, 1)
    if not 0 <= rank < world:
        raise ValueError(f"the environment says that this is process {rank} of {world} (RANK, WORLD_SIZE)")
    return rank, world


def local_rank() -> int:
    """Number of this process among those of its machine; 0 for one that was started alone."""
    return _first_of(LOCAL_RANKS, 0)


def _first_of(names: tuple[str, ...], otherwise: int) -> int:
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return otherwise
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a number, got {os.environ[name]!r}") from None


def on_rank_zero(work: Callable[[], T]) -> T:
    """What `work` returns in process 0, in every process of a group. Where it fails, process 0 raises its error, and
    the others leave with SystemExit: an error is reported once."""
    rank, world = rank_and_world()
    if world == 1:
        return work()
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError(
            f"this is process {rank} of {world}, but there is no process group: on GPUs start them by torchrun or "
            "accelerate launch, as mpirun's are joined on the CPU alone (model.device cpu)"
        )
    found: list[Any] = [None]
    if rank == 0:
        try:
            found = [(work(),)]
        finally:
            dist.broadcast_object_list(found, src=0)
    else:
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            raise SystemExit(2)
    return found[0][0]


@contextlib.contextmanager
def print_on_rank_zero() -> Iterator[None]:
    """In this block only process 0 prints."""
    if rank_and_world()[0] == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
