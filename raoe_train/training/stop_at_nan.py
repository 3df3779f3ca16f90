"""A loss that is NaN or infinite ends a training run, with what was in the batch and what to try.

transformers would hide it: it logs the average of the losses before instead (logging_nan_inf_filter), and goes on with
weights that are NaN. Its look at each loss is what this costs, in place of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from raoe_train.training.run_directory import newest_checkpoint

SHOWN = 3  # rows of a batch with their texts
LEFT = "its gradient left weights that are not finite"
CHUNK = 1024  # rows of a dataset, tokenised together when a batch's are looked for


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
        of = self.accelerator.process_index
        where = f" of process {of}" if self.accelerator.num_processes > 1 else ""
        name = batch.get("dataset_name")
        dataset = self.train_dataset
        if isinstance(dataset, Mapping):
            name = name or next(iter(dataset))
            dataset = dataset[name]
        rows = rows_of(batch, dataset, self.data_collator)
        if not rows:
            yield f"rows of the batch{where}: not found in the data"
            return
        listed = ", ".join("?" if row is None else str(row) for row in rows[:32])
        more = f" and {len(rows) - 32} more" if len(rows) > 32 else ""
        yield f"rows of the batch{where}, of {name or 'the data'} as it was read, from 0: {listed}{more}"
        for row in [row for row in rows if row is not None][:SHOWN]:
            yield f"  {row}: {_shown(dataset[row])}"

    def _to_try(self: Any) -> Iterator[str]:
        rate = f"training.learning_rate (now {self.args.learning_rate:g})"
        hints = [f"a smaller {rate} or more training.warmup_steps", *self.hints]
        if self.args.fp16:
            hints.append("training.bf16 in the place of fp16, whose largest number is 65504")
        elif self.args.bf16:
            hints.append("training.bf16 false")
        hints.append("a look at these rows: scores that are no numbers, sentences that are empty or not text")
        yield "to try: " + "; ".join(hints)
        last = newest_checkpoint(Path(self.args.output_dir))
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


def rows_of(batch: Mapping[str, Any], dataset: Any, collate: Callable[[list[Any]], Any]) -> list[int | None]:
    """The numbers of a collated batch's rows in the dataset, found by their tokens; [] where a batch has none.

    A row that is in the dataset more than once has its first place's number, one that is not found None. It reads the
    dataset up to the last of them, tokenised anew.
    """
    wanted = _token_rows(batch)
    places: dict[Any, int] = {}
    missing = set(wanted)
    for start in range(0, len(dataset), CHUNK):
        if not missing:
            break
        rows = [dataset[number] for number in range(start, min(start + CHUNK, len(dataset)))]
        for number, tokens in enumerate(_token_rows(collate(rows)), start):
            if tokens in missing:
                missing.discard(tokens)
                places[tokens] = number
    return [places.get(tokens) for tokens in wanted]


def _token_rows(batch: Mapping[str, Any]) -> list[Any]:
    """What each row of a batch is, as tokens without padding: a tuple for each column, or for each of its sentences."""
    columns = []
    for name, ids in batch.items():
        if name == "input_ids" or name.endswith("_input_ids"):
            mask = batch.get(name.removesuffix("input_ids") + "attention_mask")
            if getattr(ids, "ndim", 0) != 2 or mask is None:
                return []
            columns.append([tuple(row[keep.bool()].tolist()) for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)])
    label = batch.get("label")
    if isinstance(label, Mapping) and "lengths" in label and len(columns) == 1:  # lists of sentences, one after another
        sentences = iter(columns[0])
        return [tuple(next(sentences) for _ in range(length)) for length in label["lengths"].tolist()]
    return list(zip(*columns, strict=True)) if columns else []


def _shown(row: Mapping[str, Any]) -> str:
    parts = []
    for name, value in row.items():
        if isinstance(value, str):
            parts.append(repr(value[:80]))
        elif isinstance(value, list) and value and isinstance(value[0], str):
            parts.append(f"{value[0][:80]!r} and {len(value) - 1} more")
        elif isinstance(value, (int, float)):
            parts.append(f"{name} {value:g}")
    return " | ".join(parts)
