"""This process among those that torchrun, accelerate or mpirun started."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LOCK = "lock"
# torchrun's and accelerate's, and those of MPICH and Intel, of Open MPI and of MVAPICH: the order is accelerate's.
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
WORLDS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def rank_and_world() -> tuple[int, int]:
    """(number of this process, how many there are); (0, 1) for one that was started alone."""
    return _first_of(RANKS, 0), _first_of(WORLDS, 1)


def local_rank() -> int:
    """Number of this process among those of its machine; 0 for one that was started alone."""
    return _first_of(LOCAL_RANKS, 0)


def _first_of(names: tuple[str, ...], otherwise: int) -> int:
    return int(next(filter(None, map(os.environ.get, names)), otherwise))


def in_first(work: Callable[[], T]) -> T:
    """What `work` gives the first process, in every process of a group. Where the first fails, it raises its error, and
    the others leave with SystemExit: what is to be said is said once."""
    rank, world = rank_and_world()
    if world == 1:
        return work()
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError(
            f"this is process {rank} of {world}, but no group of them was made: on GPUs start them by torchrun or "
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
def first_speaks() -> Iterator[None]:
    """In this block only the first process prints."""
    if rank_and_world()[0] == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def locked(folder: Path, concluded: Callable[[], object]) -> Iterator[None]:
    """One process at a time, by a lock file in `folder`, which goes with the process that holds it. In the end the
    folder is removed if it is empty or `concluded` gives something true."""
    path = folder / LOCK
    handle = _held(path, wait=True)
    try:
        yield
    finally:
        if concluded():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there is work in it
                folder.rmdir()
        os.close(handle)


@contextlib.contextmanager
def owned(output: Path, overwrite: bool = False) -> Iterator[None]:
    """In this block no other process has the output, by a lock file OUTPUT.lock, which goes with the process that holds
    it; ValueError where one has. OSError where nothing can be written, but for an output that is there, and is not to
    be overwritten: it may be read, and is not owned."""
    path = output.with_name(f"{output.name}.{LOCK}")
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        handle = _held(path, wait=False)
    except BlockingIOError:
        raise ValueError(f"{output}: another process is writing to it; wait, or choose another output") from None
    except OSError as error:
        if overwrite or not output.exists() or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
        with contextlib.suppress(OSError):  # there is something in it
            for folder in missing:
                folder.rmdir()


def _held(path: Path, wait: bool) -> int:
    """The open lock file, which is this process's until it is closed; BlockingIOError for another's, not to `wait`."""
    import fcntl  # Windows has none, and nothing else here needs it

    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process has just removed the folder
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            raise
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # it was removed while we waited, so it keeps nobody out any more
