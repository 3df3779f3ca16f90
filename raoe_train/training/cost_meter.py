"""What training costs: seconds of the trainer's loop, and the most memory that it took."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class CostMeter(TrainerCallback):
    """Measures a trainer's loop.

    Its seconds are those of reading and tokenising batches, of steps and of a teacher that is asked in them, without
    evaluation and without writing checkpoints. Its memory is the peak of all that the loop does, evaluation included.

    Args:
        device: that the encoder trains on.
    """

    def __init__(self, device: Any) -> None:
        self.cuda = device.type == "cuda"
        self.seconds, self.first_step, self.last_step, self.peak = 0.0, 0, 0, 0.0
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = state.global_step  # more than 0 where a killed run goes on
        reset_peak(self.cuda)
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_step = state.global_step
        self.peak = peak_mb(self.cuda)

    def _pause(self) -> None:
        # Evaluating and saving come right after a step's or an epoch's end, and move the mark when they are done.
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    def costs(self) -> dict[str, Any]:
        """{"train_seconds", "train_steps": the steps that they were for, "peak_memory_mb"}."""
        return {
            "train_seconds": round(self.seconds, 3),
            "train_steps": self.last_step - self.first_step,
            "peak_memory_mb": round(self.peak, 1),
        }


def reset_peak(cuda: bool) -> None:
    """Let the peak begin anew: what was freed before, evaluating a start, is no part of what comes."""
    if cuda:
        import torch

        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # not Linux, or not allowed: the peak is then that of the whole process
        CLEAR.write_text("5")


def peak_mb(cuda: bool) -> float:
    """Peak memory since reset_peak, in MB of 10^6 bytes: of tensors on the CUDA device, or resident memory of this
    process, Python and its libraries included.

    On Linux that is VmHWM, not getrusage's ru_maxrss: a child takes over the ru_maxrss of the process that started it.
    """
    if cuda:
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e6
