"""What training costs: seconds of the trainer's loop, and the most memory that it took."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from raoe_train.artifacts.memory import peak_mb, reset_peak


class CostMeter(TrainerCallback):
    """Measures a trainer's loop.

    Its seconds are those of reading and tokenising batches, of steps and of a teacher that is asked in them, without
    evaluation and without writing checkpoints. Its memory is the peak of all that the loop does, evaluation included.
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
        # Evaluating and saving come right after a step's or an epoch's end, and move the mark when they are done.
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    on_save = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_step = state.global_step
        self.peak = peak_mb(self.cuda)

    def costs(self) -> dict[str, Any]:
        """{"train_seconds", "train_steps": the steps that they were for, "peak_memory_mb"}."""
        return {
            "train_seconds": round(self.seconds, 3),
            "train_steps": self.last_step - self.first_step,
            "peak_memory_mb": round(self.peak, 1),
        }
