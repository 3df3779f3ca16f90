"""The trainer of encoders: sentence-transformers', which knows what our losses read and stops where one is NaN."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch import nn
from transformers import TrainerCallback

from raoe_train.data.tokens import with_tokens
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.by_length import ByLength, fits
from raoe_train.losses.keep import Keep, weight_for
from raoe_train.losses.scale import innermost, scaled
from raoe_train.training.log_table import Reports
from raoe_train.training.loss_state import load_loss_state, save_loss_state
from raoe_train.training.stop_at_nan import StopsAtNaN

logger = logging.getLogger(__name__)


class Trainer(StopsAtNaN, Reports, SentenceTransformerTrainer):
    """SentenceTransformerTrainer for any loss, ours and sentence-transformers' own, alone or by dataset.

    What it adds: batches are made by the collator that the loss `reads`, also inside a MatryoshkaLoss; texts get the
    encoder's own prompt, where `args` names none; a loss with scale="auto" is given the tau that fits the encoder and
    each training dataset (raoe_train.losses.scale), which is printed, and one with a memory remembers each dataset
    apart; batches are encoded by length (raoe_train.losses.ByLength); a loss that is NaN or infinite ends the training
    and shows the rows; what a loss has of its own is in the checkpoints (raoe_train.training.loss_state), and is not
    decayed where it is one number; its log is printed as a table, and callbacks are told more
    (raoe_train.training.log_table). The job `train` uses no other.

    Args:
        model: the encoder.
        args: SentenceTransformerTrainingArguments; they stay as they are.
        train_dataset: a datasets.Dataset with the columns that the loss reads, or several by name: no batch mixes them.
        eval_dataset: as train_dataset; with scale="auto" or a memory and train datasets by name, of the same names.
        loss: a loss, or one for each dataset by name.
        evaluator, data_collator, others: as SentenceTransformerTrainer's. A data_collator of your own takes the
            place of the loss's, and adds prompts as it does.
        cache_dir: directory that keeps the tokens of the training sentences for other runs; None keeps none.
        by_length: False pads every batch to its longest text, as sentence-transformers does; "packed" see ByLength.
        keep: weight of a term beside every loss that holds the embeddings of a batch's texts where they were before
            training (raoe_train.losses.keep); 0 for none, "auto" for what suits the scores (weight_for). It is part of
            what is done by length.

    Attributes:
        scales: {name of a training dataset, "train" of one without: tau} of our losses, as it is now.
        keep: the weight, a number.

    Raises:
        ValueError: losses whose batches are made differently; scale="auto" and no scores; or a keep below 0, or where
            it cannot be.
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
        cache_dir: str | None = None,
        by_length: bool | Literal["packed"] = True,
        keep: float | Literal["auto"] = 0.0,
        **others: Any,
    ) -> None:
        args = copy.copy(args) if args is not None else SentenceTransformerTrainingArguments(output_dir="tmp_trainer")
        if model is not None and args.prompts is None and model.default_prompt_name:
            # the collator does not look there
            args.prompts = model.prompts.get(model.default_prompt_name)
        prompts, processes = cast(Any, args.prompts), cast(Any, args.accelerator_config)
        if loss is None and model is not None:
            loss = self.get_default_loss(model)
        several = isinstance(train_dataset, Mapping)
        datasets = train_dataset if several else {} if train_dataset is None else {"train": train_dataset}
        by_dataset = isinstance(loss, Mapping)
        made = {name: _on(model, each) for name, each in loss.items()} if by_dataset else _on(model, loss)
        by_name = made if by_dataset else dict.fromkeys(datasets, made)
        self.data_collator_class = _collator(made.values() if by_dataset else [made])
        if data_collator is None and model is not None:
            data_collator = self.get_data_collator(model, args)
            data_collator.preprocess_fn = with_tokens(model, datasets, cache_dir, prompts)
        share = args.world_size if processes.split_batches else 1  # of a batch that is cut for processes
        batch_size = args.train_batch_size // share
        users = Counter(map(id, by_name.values()))
        found = {
            name: scaled(
                by_name[name],
                model,
                dataset,
                name,
                batch_size=batch_size,
                seed=args.seed,
                shared=users[id(by_name[name])] > 1,
            )
            for name, dataset in datasets.items()
            if name in by_name
        }
        ours = {name: innermost(each) for name, each in found.items()}
        self._with_scale = {name: each for name, each in ours.items() if isinstance(each, CachedLoss)}
        if self._with_scale:
            tau = " and ".join(f"{scale:g}" for scale in dict.fromkeys(self.scales.values()))
            self.hints = [f"a smaller loss.scale (now {tau})"]
        compares = [each for each in ours.values() if getattr(each, "compares_batch", False)]
        if args.gradient_accumulation_steps > 1 and compares:
            logger.warning(
                "gradient accumulation does not enlarge the batch that pairs are ranked, or negatives drawn, in; "
                "loss.mini_batch_size does, at the same memory"
            )
        if several and any(found[name] is not by_name[name] for name in found):
            made = {**(made if by_dataset else {}), **found}
        elif not several:
            made = found.get("train", made)
        self.keep = weight_for(datasets, keep)
        if self.keep and not by_length:
            raise ValueError("keep is for batches read by length: leave by_length as it is")
        if not by_length and getattr(model, "hf_device_map", None):
            raise ValueError("model.device_map is for batches read by length: leave training.by_length as it is")
        if by_length:
            kept = Keep(model, self.keep) if self.keep else None
            wrap = functools.partial(_by_length, packed=by_length == "packed", keep=kept)
            made = {name: wrap(each) for name, each in made.items()} if isinstance(made, Mapping) else wrap(made)
        super().__init__(model, args, train_dataset, eval_dataset, made, evaluator, data_collator, **others)
        self.add_callback(_OfLosses())

    @property
    def scales(self) -> dict[str, float]:
        return {name: each.current_scale for name, each in self._with_scale.items()}

    # sentence-transformers would move a loss to one device, and the encoder in it
    def prepare_loss(self, loss: Any, model: Any) -> Any:
        if not getattr(model, "hf_device_map", None):
            return super().prepare_loss(loss, model)
        placed = {*model.modules()}
        for part in (part for part in loss.modules() if part not in placed):
            part._apply(lambda tensor: tensor.to(model.device), recurse=False)
        return loss

    def padding_saved(self) -> int:
        losses = {id(each): each for each in (self.loss.values() if isinstance(self.loss, Mapping) else [self.loss])}
        by_length = [each for each in losses.values() if isinstance(each, ByLength)]
        saved = sum(each.saved for each in by_length)
        for each in by_length:
            each.saved = 0
        return saved

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        numbers = {name for name, parameter in model.named_parameters() if parameter.ndim == 0}
        return [name for name in super().get_decay_parameter_names(model) if name not in numbers]

    # With the optimizer's state, which has the moments of the loss's parameters, and before trainer_state.json, without
    # which a checkpoint counts for nothing.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_loss_state(Path(output_dir), self.loss, self.args.process_index)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_loss_state(Path(checkpoint), self.loss, self.args.process_index)
        super()._load_optimizer_and_scheduler(checkpoint)


class _OfLosses(TrainerCallback):
    # transformers clears the encoder's gradients alone, and sentence-transformers the loss's only from 6.2
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].zero_grad()


def _on(model: Any, loss: Any) -> Any:
    """A loss on the model; sentence-transformers takes functions that make one, too."""
    if isinstance(loss, ByLength):
        return loss.loss
    return loss if loss is None or isinstance(loss, nn.Module) or model is None else loss(model)


def _by_length(loss: Any, packed: bool, keep: Keep | None) -> Any:
    if loss is None or fits(loss):
        return loss and ByLength(loss, packed=packed, keep=keep)
    if keep is not None:
        raise ValueError(f"keep is for losses of embeddings, and {type(loss).__name__} reads more of its model")
    logger.warning("%s reads more of its model than embeddings: its batches stay padded", type(loss).__name__)
    return loss


def _collator(losses: Any) -> Any:
    """The class of collators for all of these losses."""
    reads = [getattr(innermost(loss), "reads", None) for loss in losses]
    classes = {each.collator for each in reads if each is not None} - {SentenceTransformerDataCollator}
    if len(classes) > 1:
        names = " and ".join(sorted(each.__name__ for each in classes))
        raise ValueError(f"the losses' batches are made differently, by {names}: give a data_collator of your own")
    return next(iter(classes), SentenceTransformerDataCollator)
