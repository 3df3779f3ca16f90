"""Time contenders in turn, A B C A B C …, so that a drift in the machine's speed affects all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.case import COPIES, Call

LONG = 2.0  # seconds; if a contender's first call takes less, two more calls follow before the rounds
FEWEST = 3  # minimum number of rounds


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _block(call: Call, repeats: int, device: str, before: Call | None = None) -> tuple[float, float, float]:
    """Seconds per call by the wall clock, by the device's events, and until calls return (host), averaged over a series
    of calls that ends when the device is idle. The three are the same without a GPU, and if `before` is given."""
    if before:
        wall = sum(_after(before, call, i, device) for i in range(repeats)) / repeats
        return wall, wall, wall
    wait(device)
    if device == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    begin = time.perf_counter()
    for i in range(repeats):
        call(i)
    host = (time.perf_counter() - begin) / repeats
    if device == "cuda":
        last.record()
    wait(device)
    wall = (time.perf_counter() - begin) / repeats
    return (wall, first.elapsed_time(last) / 1e3 / repeats, host) if device == "cuda" else (wall, wall, wall)


def _after(before: Call, call: Call, i: int, device: str) -> float:
    before(i)
    wait(device)
    begin = time.perf_counter()
    call(i)
    wait(device)
    return time.perf_counter() - begin


def measure(
    contenders: Mapping[str, Call], device: str, *, before: Call | None = None, rounds: int = 15, block: float = 0.02,
    budget: float = 60.0,
) -> dict[str, list[tuple[float, float, float]]]:  # fmt: skip
    """Return (wall, device, host) seconds per call for each contender, one triple per round.

    In a round, each contender gets about `block` seconds of calls. If all rounds would take longer than `budget`
    seconds, there are fewer of them, but at least FEWEST.
    """
    repeats, once = {}, 0.0
    ahead = _block(before, 1, device)[0] if before else 0.0
    for name, call in contenders.items():
        seconds = _block(call, 1, device)[0]  # includes compilation and allocation
        if seconds < LONG:
            seconds = ahead + min(_block(call, 1, device)[0] for _ in range(2))
        repeats[name] = max(1, round(block / max(seconds, 1e-9)))
        once += seconds * repeats[name]
    rounds = max(FEWEST, min(rounds, int(budget / once))) if once else rounds
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            times[name].append(_block(call, repeats[name], device, before))
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the rounds of slow / fast."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """The 10 %, 50 % and 90 % quantiles."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return tenths[0], statistics.median(seconds), tenths[-1]


def rates(device: str) -> dict[str, float]:
    """Rates of this machine: bytes/s of a copy (read + written), and FLOP/s of a square matrix product."""
    cells, side = (1 << 28, 8192) if device == "cuda" else (1 << 25, 2048)
    result = {"copy_bytes_s": 8 * cells / _copy(cells, device)}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(side, side, dtype=dtype, device=device)  # random, because products of ones run faster
        name = str(dtype).removeprefix("torch.")
        result[f"matmul_{name}_flop_s"] = 2 * side**3 / _best(lambda i, a=a: a @ a, device)
    return result


def _copy(cells: int, device: str) -> float:
    source = torch.ones(cells, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _best(lambda i: target.copy_(source), device)


def _best(call: Call, device: str) -> float:
    call(0)
    return min(_block(call, COPIES, device)[1] for _ in range(5))


def operations(call: Call) -> int:
    """Number of operations that a call dispatches, and so its work on the host."""
    from torch.utils._python_dispatch import TorchDispatchMode

    count = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            nonlocal count
            count += 1
            return function(*arguments, **(keywords or {}))

    with Count():
        call(0)
    return count


def profiled(call: Call, device: str) -> dict[str, float]:
    """Profile a call, print its longest operations, and return the number of kernels on the GPU and the seconds for
    which it is busy with them."""
    from torch.autograd import DeviceType
    from torch.profiler import profile

    for _ in range(2):  # the first one loads the profiler
        with profile() as profiler:
            call(0)
            wait(device)
    by = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    print(profiler.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=60))
    events: Any = profiler.events()
    kernels = [each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    return {"kernels": len(kernels), "busy_s": sum(each.time_range.elapsed_us() for each in kernels) / 1e6}


def single(call: Call, device: str) -> tuple[tuple[float, float, float], int | None]:
    """Return ((wall, device, host) seconds, extra peak memory) of one call: the allocator's memory on a GPU, resident
    memory on a CPU, None if unknown.

    Gradients of an earlier call that this call replaces are allocated before it, so they do not count as extra.
    """
    if device == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = _block(call, 1, device)
        return seconds, torch.cuda.max_memory_allocated() - before
    before_call = _reset_resident()
    seconds = _block(call, 1, device)
    return seconds, None if before_call is None else max(_status("VmHWM") - before_call, 0)


def _reset_resident() -> int | None:
    """Reset the high-water mark of resident memory and return the memory in use. Linux only; None elsewhere."""
    import ctypes
    import gc

    try:
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as mark:
            mark.write("5")
        return _status("VmRSS")
    except (OSError, StopIteration):
        return None


def _status(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key + ":"))
