"""Stop training at a loss or weights that are NaN or infinite, with an error that shows the rows of the batch."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from raoe_train.encoders.lengths import texts_of
from raoe_train.losses.collators import columns_of

MAX_ROWS = 16  # number of rows of a batch that an error shows
LEFT = "its gradient made weights NaN or infinite"
READ_LATE = ("cuda",)  # devices whose loss is read in a later step, so that the GPU does not wait for the host
IN_FLIGHT = 2  # number of steps whose losses may be unread when a step starts


class FiniteCheck(TrainerCallback):
    """Raises FloatingPointError for a loss that is not finite, and before weights that are not finite are saved or
    evaluated. A finite loss can have a gradient that is not finite; without a check of the weights, the error would
    name the next step. The trainer calls `start` and `read` around each step.

    This callback also clears the gradients of the loss's own parameters, which sentence-transformers does only from
    version 6.2 on.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.batch: Any = None  # batch of the current or last step
        self.before: Any = None  # batch of the step before
        self.unread = deque[Any]()  # (step, batch, loss, event) of steps whose losses are read late

    def start(self, batch: Mapping[str, Any]) -> None:
        """Note the batch of a step, and check the losses of earlier steps that have arrived."""
        self.before, self.batch = self.batch, dict(batch)
        self._read_late(IN_FLIGHT)

    def read(self, loss: Tensor) -> None:
        """Check the loss of the step, at once or when a later step starts. (transformers would continue.)"""
        step = self.trainer.state.global_step + 1
        if loss.device.type in READ_LATE:
            copy = torch.empty_like(loss, device="cpu", pin_memory=loss.is_cuda).copy_(loss.detach(), non_blocking=True)
            event = torch.cuda.current_stream().record_event() if loss.is_cuda else None
            self.unread.append((step, self.batch, copy, event))
        elif not math.isfinite(loss):
            problem = f"the loss is {float(loss)}"
            if self.before is not None and not has_finite_weights(self.trainer.model):
                raise not_finite(self.trainer, step - 1, f"{LEFT} ({problem} after it)", self.before)
            raise not_finite(self.trainer, step, problem, self.batch)

    def _read_late(self, most: int) -> None:
        """Check losses until at most `most` are unread, and further losses that have arrived."""
        while self.unread and (len(self.unread) > most or self.unread[0][3] is None or self.unread[0][3].query()):
            step, batch, value, event = self.unread.popleft()
            if event is not None:
                event.synchronize()
            if not math.isfinite(value):
                raise not_finite(self.trainer, step, f"the loss is {float(value)}", batch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].zero_grad()
        if state.global_step >= state.max_steps or control.should_save or control.should_evaluate:
            self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read_late(0)
        if not has_finite_weights(self.trainer.model):
            raise not_finite(self.trainer, state.global_step, LEFT, self.batch)


def has_finite_weights(model: Any) -> bool:
    """Whether all trained parameters are finite."""
    return all(bool(torch.isfinite(weight).all()) for weight in model.parameters() if weight.requires_grad)


def not_finite(trainer: Any, step: int, problem: str, batch: Mapping[str, Any]) -> FloatingPointError:
    """Return the error for a step whose loss or weights are not finite, with rows of the batch and advice."""
    tokenizer = getattr(trainer.data_collator, "tokenizer", None) or trainer.model.tokenizer
    if "plan" in batch:
        texts = texts_of(batch["plan"].runs)
        columns = [[texts[place] for place in rows[:MAX_ROWS].tolist()] for rows in batch["plan"].rows]
    else:
        columns = [texts_of([each])[:MAX_ROWS] for each in columns_of(dict(batch))[0] if "input_ids" in each]
    rows = ([tokenizer.decode(text)[:80] for text in texts] for texts in zip(*columns, strict=True))
    lines = ["  " + " | ".join(row) for row in rows]
    scales = "".join(f", loss.scale (now {scale:g})" for scale in dict.fromkeys(trainer.scales.values()))
    return FloatingPointError(
        "\n".join([f"step {step}: {problem}; the first rows of its batch, as the encoder reads them:", *lines])
        + f"\ntry a smaller training.learning_rate (now {trainer.args.learning_rate:g}){scales}, more warm-up, or "
        "training.bf16 in place of fp16, and check these rows for invalid scores and empty sentences"
    )
