"""The trainer of encoders: sentence-transformers', which knows what our losses read and stops where one is NaN."""

import copy
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from raoe_train.data.columns import NLI_LABELS
from raoe_train.losses.base import CachedLoss, losses_in
from raoe_train.losses.by_length import ByLength, Keep, fits, innermost, weight_for
from raoe_train.training.callbacks import LEFT, Bar, FiniteWeights, LogLines, Meter, finite_weights, not_finite

logger = logging.getLogger(__name__)


class Trainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer for any loss, ours and sentence-transformers' own, alone or by dataset.

    Batches are made by the collator that the loss `reads`; texts get the encoder's own prompt, where `args` names none;
    batches are encoded by length (raoe_train.losses.ByLength); a loss that is NaN or infinite ends the training and
    shows the rows; what a loss has of its own (a learned scale, a classifier) is in the checkpoints, and is not decayed
    where it is one number; the log is printed as lines, and trackers get more (raoe_train.training.callbacks).

    Args:
        model: the encoder.
        args: SentenceTransformerTrainingArguments; they stay as they are.
        train_dataset: a datasets.Dataset with the columns that the loss reads, or several by name: no batch mixes them.
        eval_dataset: as train_dataset.
        loss: a loss, a function of the model that gives one, or either by dataset.
        evaluator, data_collator, others: as SentenceTransformerTrainer's. A data_collator of your own takes the
            place of the loss's, and adds prompts as it does.
        by_length: False pads every batch to its longest text, as sentence-transformers does; "packed" see ByLength.
        keep: weight of the regularizer that holds embeddings where they were before training (`losses.by_length.Keep`);
            "auto" chooses it by the scores.

    Attributes:
        scales: {name of a dataset, "train" of one without: the scale of its loss now}.
        keep: the weight, a number.
        meter: what the loop costs.

    Raises:
        ValueError: losses whose batches are made differently, or a keep below 0, or where it cannot be.
        FloatingPointError (of `train`): a loss that is not finite, or weights that a step left so.
    """

    def __init__(
        self,
        model: Any = None,
        args: SentenceTransformerTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        evaluator: Any = None,
        data_collator: Any = None,
        *,
        by_length: bool | Literal["packed"] = True,
        keep: float | Literal["auto"] = 0.0,
        **others: Any,
    ) -> None:
        args = copy.copy(args) if args is not None else SentenceTransformerTrainingArguments(output_dir="tmp_trainer")
        self.by_length = by_length
        self.keep = weight_for(train_dataset, keep)
        if self.keep and not by_length:
            raise ValueError("keep is for batches read by length: leave by_length as it is")
        self.batch: Any = None  # of the step that is under way, or was last
        train_dataset, eval_dataset = _in_our_order(train_dataset), _in_our_order(eval_dataset)
        super().__init__(model, args, train_dataset, eval_dataset, loss, evaluator, data_collator, **others)
        if args.prompts is None and self.model.default_prompt_name:
            # the collator does not look there
            args.prompts = self.model.prompts.get(self.model.default_prompt_name)
        if data_collator is None:
            self.data_collator_class = _collator([inner for _, inner in self._inner()])
            self.data_collator: Any = self.get_data_collator(self.model, args, self.processing_class)
        self.meter = Meter(self)
        self.callback_handler.callbacks.insert(0, self.meter)  # trackers are to see what it adds
        self.add_callback(FiniteWeights(self))
        # the trainer's own comes last; one that was given stays, and so does a notebook's
        own = [each for each in self.callback_handler.callbacks if type(each) in (PrinterCallback, ProgressCallback)]
        if own:
            self.remove_callback(own[-1])
            self.add_callback(LogLines())
            if isinstance(own[-1], ProgressCallback) and sys.stderr.isatty():
                self.add_callback(Bar())

    def prepare_loss(self, loss: Any, model: Any) -> Any:
        """A loss, or what a function makes of the model, by length."""
        loss = super().prepare_loss(loss, model)
        inner = loss.loss if isinstance(loss, ByLength) else loss
        if self.by_length and fits(inner):
            kept = Keep(model, self.keep) if self.keep else None
            return ByLength(inner, packed=self.by_length == "packed", keep=kept)
        if self.keep:
            raise ValueError(f"keep is for losses of embeddings, and {type(inner).__name__} reads more of its model")
        if self.by_length:
            logger.warning("%s reads more of its model than embeddings: its batches stay padded", type(inner).__name__)
        return loss

    def train(self, *given: Any, **settings: Any) -> Any:
        result = super().train(*given, **settings)
        if (step := self.state.global_step) > (end := self.state.max_steps) > 0:
            logger.warning("nothing was trained: the checkpoint is of step %d, and this run ends at step %d", step, end)
        return result

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        shard: Any = getattr(loader, "batch_sampler", None)
        # of several processes: accelerate's, which passes no epoch on to the sampler in it, so that where a run resumes
        # within an epoch the rest of it would be drawn in epoch 0's order
        if not hasattr(shard, "set_epoch") and hasattr(getattr(shard, "batch_sampler", None), "set_epoch"):
            shard.set_epoch = shard.batch_sampler.set_epoch
        return loader

    def _inner(self) -> Iterator[tuple[str, Any]]:
        """(name of a dataset, its loss inside of all others)."""
        names = self.train_dataset if isinstance(self.train_dataset, Mapping) else ("train",)
        by_name = self.loss if isinstance(self.loss, Mapping) else dict.fromkeys(names, self.loss)
        yield from ((name, innermost(loss)) for name, loss in by_name.items())

    @property
    def scales(self) -> dict[str, float]:
        return {name: inner.current_scale for name, inner in self._inner() if isinstance(inner, CachedLoss)}

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **settings: Any) -> Any:
        self.meter.count(inputs)
        before, self.batch = self.batch, dict(inputs)
        loss = super().training_step(model, inputs, *arguments, **settings)
        # with logging_nan_inf_filter transformers would log the average of the losses before instead, and go on
        if not math.isfinite(loss):
            step, found = self.state.global_step + 1, f"the loss is {float(loss)}"
            if before is not None and not finite_weights(self.model):
                raise not_finite(self, step - 1, f"{LEFT} ({found} after it)", before)
            raise not_finite(self, step, found, self.batch)
        return loss

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        numbers = {name for name, parameter in model.named_parameters() if parameter.ndim == 0}
        return [name for name in super().get_decay_parameter_names(model) if name not in numbers]

    # transformers writes the model alone. A loss's own parameters go with the optimizer's state, which has their
    # moments, and before trainer_state.json, without which a checkpoint counts for nothing.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if state := self._loss_state():
            folder = Path(output_dir)
            folder.mkdir(parents=True, exist_ok=True)  # the first process, which makes it, may be later
            torch.save(state, folder / f"loss_state_{self.args.process_index}.pt")
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (needed := self._loss_state()):
            files = [Path(checkpoint, f"loss_state_{process}.pt") for process in (self.args.process_index, 0)]
            file = next((file for file in files if file.is_file()), None)
            state = {} if file is None else torch.load(file, map_location="cpu", weights_only=True)
            if {name: value.shape for name, value in state.items()} != {n: value.shape for n, value in needed.items()}:
                raise ValueError(
                    f"{checkpoint} has another loss's state: this one has {', '.join(sorted(needed))}, "
                    f"the checkpoint {', '.join(sorted(state)) or 'nothing'}; start over, or resume with that loss"
                )
            for name, value in needed.items():
                value.copy_(state[name])
        super()._load_optimizer_and_scheduler(checkpoint)

    def _loss_state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the losses that are not their encoders'. Not state_dict, which would ask those,
        too: where they are sharded, for all of their weights."""
        losses = self.loss if isinstance(self.loss, Mapping) else {"": self.loss}
        return {
            f"{name}.{where}{key}": value.detach()
            for name, loss in losses.items()
            for where, part in losses_in(loss)
            for key, value in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            if key not in part._non_persistent_buffers_set
        }


def _in_our_order(data: Any) -> Any:
    """A dataset, or several by name, whose NLI labels are ours: a ClassLabel column may number the words otherwise."""
    if isinstance(data, Mapping):
        made: Any = type(data)  # a dict or a DatasetDict
        return made({name: _in_our_order(each) for name, each in data.items()})
    names = getattr((getattr(data, "features", None) or {}).get("label"), "names", [])
    numbers = [NLI_LABELS.get(name.lower(), -1) for name in names]
    if sorted(numbers) == numbers or min(numbers) < 0 or not hasattr(data, "__len__"):
        return data
    labels = [label if label in (None, -1) else numbers[label] for label in data["label"]]
    return data.remove_columns("label").add_column("label", labels)


def _collator(losses: list[Any]) -> Any:
    """The class of collators for all of these losses."""
    classes = {loss.reads.collator for loss in losses if hasattr(loss, "reads")} - {SentenceTransformerDataCollator}
    if len(classes) > 1:
        names = " and ".join(sorted(each.__name__ for each in classes))
        raise ValueError(f"the losses' batches are made differently, by {names}: give a data_collator of your own")
    return next(iter(classes), SentenceTransformerDataCollator)
