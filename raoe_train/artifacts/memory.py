"""The most memory that something took: of a CUDA device, or of this process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(cuda: bool) -> None:
    """Let the peak begin anew; resident memory's only on Linux, where that is allowed."""
    if cuda:
        import torch

        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def peak_mb(cuda: bool) -> float:
    """Peak memory since reset_peak, in MB of 10^6 bytes: of tensors on the CUDA device, or resident memory of this
    process, Python and its libraries included."""
    if cuda:
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    if STATUS.exists():  # VmHWM: a child takes over getrusage's ru_maxrss from the process that started it
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6
