"""A loss that is NaN or infinite ends a training run, with what was in the batch and what to try.

transformers would hide it: it logs the average of the losses before instead (logging_nan_inf_filter), and goes on with
weights that are NaN. Its look at each loss is what this costs, in place of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from raoe_train.training.run_directory import newest_checkpoint

SHOWN = 16  # rows of a batch
LEFT = "its gradient left weights that are not finite"


class StopsAtNaN:
    """Makes steps of a trainer, transformers' Trainer or a subclass, raise FloatingPointError at a loss that is not
    finite: `class Stopping(StopsAtNaN, Trainer)`.

    Neither is a checkpoint written, nor the encoder evaluated, once its weights are not finite: a loss can be while its
    gradient is not, and then the step after it would be blamed.

    Attributes:
        hints: what to try with respect to the loss, in words.
    """

    hints: Sequence[str] = ()

    def __init__(self: Any, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[misc]
        self.batch: Any = None  # of the step that is under way, or was last
        self.add_callback(_BeforeSaving(self))

    def training_step(self: Any, model: Any, inputs: dict[str, Any], *arguments: Any, **settings: Any) -> Any:
        before, self.batch = self.batch, dict(inputs)
        loss = super().training_step(model, inputs, *arguments, **settings)  # type: ignore[misc]
        if not math.isfinite(loss):
            step, found = self.state.global_step + 1, f"the loss is {float(loss)}"
            if before is not None and not finite_weights(self.model):
                raise self.not_finite(step - 1, f"{LEFT} ({found} after it)", before)
            raise self.not_finite(step, found, self.batch)
        return loss

    def not_finite(self: Any, step: int, found: str, batch: Any) -> FloatingPointError:
        """The error of a step: what was in its batch, and what to try."""
        return FloatingPointError("\n".join([f"step {step}: {found}", *self._rows(batch), *self._to_try()]))

    def _rows(self: Any, batch: Mapping[str, Any]) -> Iterator[str]:
        tokenizer = getattr(self.data_collator, "tokenizer", None) or self.model.tokenizer
        of, name = self.accelerator, batch.get("dataset_name")
        where = f" of process {of.process_index}" if of.num_processes > 1 else ""
        yield f"the batch{where}{f', of {name}' if name else ''}, as the encoder reads its first rows:"
        columns = []
        for key, ids in batch.items():
            real = batch.get(f"{key.removesuffix('input_ids')}attention_mask")
            if key.endswith("input_ids") and ids.ndim == 2 and real is not None:
                rows = zip(ids[:SHOWN], real[:SHOWN].bool(), strict=True)
                columns.append([tokenizer.decode(row[keep].tolist()) for row, keep in rows])
        for texts in zip(*columns, strict=True):
            yield "  " + " | ".join(text[:80] for text in texts)

    def _to_try(self: Any) -> Iterator[str]:
        rate = f"training.learning_rate (now {self.args.learning_rate:g})"
        hints = [f"a smaller {rate} or more training.warmup_steps", *self.hints]
        if self.args.fp16:
            hints.append("training.bf16 in the place of fp16, whose largest number is 65504")
        elif self.args.bf16:
            hints.append("training.bf16 false")
        hints.append("a look at these rows: scores that are no numbers, sentences that are empty or not text")
        yield "to try: " + "; ".join(hints)
        last = newest_checkpoint(Path(self.args.output_dir), self.args.save_only_model)
        yield (
            f"The last good checkpoint is {last}: --model.name {last} starts another run from it"
            if last
            else "There is no checkpoint yet (training.save_strategy steps, training.save_steps)"
        )


class _BeforeSaving(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = state.global_step >= state.max_steps
        if (last or control.should_save or control.should_evaluate) and not finite_weights(self.trainer.model):
            raise self.trainer.not_finite(state.global_step, LEFT, self.trainer.batch)

    on_epoch_end = on_step_end


def finite_weights(model: Any) -> bool:
    """Whether all numbers of all parameters that are trained are finite."""
    return all(bool(torch.isfinite(weight).all()) for weight in model.parameters() if weight.requires_grad)
