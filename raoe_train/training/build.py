"""What a recipe of the job `train` becomes: a loss that can be, and the trainer of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.trainer_callback import EarlyStoppingCallback

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.data.settings import Data
from raoe_train.data.tables import Texts
from raoe_train.encoders.frozen import embedder, remembered
from raoe_train.losses.reads import LISTS, SENTENCES_ALONE
from raoe_train.losses.registry import LOSSES, asks_teacher, make_loss
from raoe_train.training.arguments import check_training, for_all_processes
from raoe_train.training.language_model import language_model_trainer
from raoe_train.training.list_targets import Teacher
from raoe_train.training.trainer import Trainer
from raoe_train.training.training_data import check_sizes


def checked_loss(data: Data, teacher: Teacher, loss: dict[str, Any], training: dict[str, Any]) -> Any:
    """The loss, on no model; ValueError for what cannot be, before anything is read."""
    if not data.train:
        raise ValueError("--data.train is missing: the pairs to train on")
    blank = make_loss(loss)
    lists, asks = blank.reads is LISTS, asks_teacher(LOSSES[loss["name"]])
    if teacher.name is None and (asks or (lists and teacher.information != "ranking")):
        alone = " (--teacher.information ranking takes the order of the lists alone)" if lists else ""
        raise ValueError(f"--teacher.name is missing: the encoder that loss {loss['name']} learns from{alone}")
    if teacher.name is not None and not (asks or lists):
        raise ValueError(f"loss {loss['name']} asks no teacher: leave --teacher.name out")
    if data.redraw and (data.max_rows is None or blank.reads is SENTENCES_ALONE):
        raise ValueError("data.redraw draws so many rows anew each epoch, and no single sentences: --data.max_rows")
    if data.shuffle_lists and not lists:
        raise ValueError(f"loss {loss['name']} reads no lists: leave --data.shuffle_lists out")
    check_training(training, bool(data.dev or data.dev_share))
    scale = data.score_scale
    if scale and len(scale) not in (2, 2 * len(data.train)):
        raise ValueError(f"data.score_scale takes 2 numbers, or 2 for each of data.train's sources; got {scale}")
    return blank


def build_trainer(
    encoder: Any,
    datasets: Any,
    loss: dict[str, Any],
    teacher: Teacher,
    settings: dict[str, Any],
    *,
    evaluator: Any,
    patience: int | None,
    by_length: bool,
    keep: float | Literal["auto"],
    cache_dir: str | None,
) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """(the trainer of the encoder, or of the decoder inside it for single sentences; what metrics.json says of it)."""
    if make_loss(loss).reads is SENTENCES_ALONE:
        return language_model_trainer(encoder, datasets, settings)
    args = SentenceTransformerTrainingArguments(**for_all_processes(settings))
    if args.dataloader_drop_last:
        check_sizes(datasets, args.train_batch_size, rank_and_world()[1])
    embed = None
    if asks_teacher(LOSSES[loss["name"]]):
        if teacher.cache is not None:
            embed = remembered(teacher, Texts(datasets), "teacher")
        else:
            embed = embedder(teacher, "teacher")
            embed(["."])  # loads it: that is to be no part of the first step's time
    made = make_loss(loss, encoder, embed)
    own: dict[str, Any] = {"cache_dir": cache_dir, "by_length": by_length, "keep": keep}
    trainer = Trainer(encoder, args, datasets, loss=made, evaluator=evaluator, **own)
    if patience is not None:
        trainer.add_callback(EarlyStoppingCallback(int(patience)))
    return trainer, lambda: {"scale": trainer.scales, "keep": trainer.keep}
