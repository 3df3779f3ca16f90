"""Timing contenders in turn, A B C A B C …, so that a machine whose speed drifts drifts for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds(call: Call, repeats: int, device: str) -> float:
    """Wall time of one call, averaged over a run of them that ends with the device idle."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(device)
    return (time.perf_counter() - begin) / repeats


def measure(
    contenders: Mapping[str, Call], device: str, *, rounds: int = 15, block: float = 0.02, budget: float = 60.0
) -> dict[str, list[float]]:
    """Seconds a call for each contender, one number a round.

    A round gives each contender about `block` seconds of calls. What takes longer than `budget` for all rounds
    gets fewer of them, at least 3.
    """
    repeats, once = {}, 0.0
    for name, call in contenders.items():
        call()  # compilation, allocation
        seconds = min(_seconds(call, 1, device) for _ in range(2))
        repeats[name] = max(1, round(block / max(seconds, 1e-9)))
        once += seconds * repeats[name]
    rounds = max(3, min(rounds, int(budget / once))) if once else rounds
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            times[name].append(_seconds(call, repeats[name], device))
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the rounds of slow / fast, pair by pair."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def peak_bytes(call: Call, device: str) -> int | None:
    """Extra memory at the peak of one call: the allocator's on a GPU, resident memory on a CPU (None where unknown)."""
    if device == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        _wait(device)
        return torch.cuda.max_memory_allocated() - before
    return _resident_peak(call)


def _resident_peak(call: Call) -> int | None:
    """Linux: reset the high-water mark of resident memory, call, read it."""
    import ctypes
    import gc

    try:
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as mark:
            mark.write("5")
        before = _status("VmRSS")
        call()
        return max(_status("VmHWM") - before, 0)
    except (OSError, StopIteration):
        return None


def _status(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key + ":"))
