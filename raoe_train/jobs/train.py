"""The job `train`: a recipe run on raoe_train.training.trainer.Trainer, resumable, leaving one directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from raoe_train.artifacts.processes import first_speaks, in_first, rank_and_world
from raoe_train.artifacts.provenance import commit, versions
from raoe_train.artifacts.writing import write_json
from raoe_train.data.settings import Data
from raoe_train.encoders.frozen import embedder
from raoe_train.encoders.named import Model
from raoe_train.evaluation.tasks import Polarity, evaluate_encoder
from raoe_train.jobs.shared import job
from raoe_train.recipe import Option, to_dict
from raoe_train.training.arguments import check_training, for_all_processes, join, trainer_settings, training_settings
from raoe_train.training.list_targets import Teacher, check_teacher
from raoe_train.training.measures import dev_evaluator, dev_metrics, summary
from raoe_train.training.run_directory import (
    CHECKPOINTS,
    INITIAL,
    TEACHER,
    claim,
    clear_unfinished,
    log_writer,
    newest_checkpoint,
    starting_encoder,
)

logger = logging.getLogger(__name__)


@dataclass
class Evaluation:
    """What to evaluate before and after training."""

    tasks: Annotated[list[str], "tasks of any kind, as of the job evaluate, looked up in data.dir"] = field(
        default_factory=list
    )
    before: Annotated[bool, "evaluate them before training, too"] = True
    batch_size: Annotated[int, "sentences at a time"] = 64


def _loss(given: Any, key: str) -> dict[str, Any]:
    from raoe_train.losses.registry import loss_settings

    return loss_settings(given, key)


def _loss_keys(where: str) -> Iterator[tuple[str, Any, str]]:
    from raoe_train.losses.registry import loss_keys

    return loss_keys(where)


@job(together=True)
@first_speaks()
def train(
    model: Annotated[Model, Option(word="name")] = Model(),
    data: Annotated[Data, Option()] = Data(),
    teacher: Annotated[Teacher, Option(word="name")] = Teacher(),
    loss: Annotated[dict[str, Any], Option(convert=_loss, keys=_loss_keys)] = {},
    training: Annotated[
        dict[str, Any],
        Option(
            "batch_size, epochs, seed, patience, or any field of SentenceTransformerTrainingArguments",
            convert=training_settings,
        ),
    ] = {},
    evaluation: Annotated[Evaluation, Option()] = Evaluation(),
    polarity: Annotated[Polarity, Option()] = Polarity(),
    output: Annotated[str | None, "directory for model, recipe.yaml, metrics.json, log.jsonl, run.png"] = None,
    overwrite: Annotated[bool, "replace what another recipe left in output"] = False,
) -> dict[str, Any]:
    """Train an encoder on scored pairs.

    Or on triplets, labelled pairs, lists, whatever the loss reads (raoe_train.losses.registry). The encoder is saved in
    the directory `output`, with recipe.yaml, metrics.json, log.jsonl and run.png. Run again with the same settings it
    goes on where it stopped; a finished run is returned at once. Under torchrun or accelerate all processes train
    together; the first writes and prints.

    Returns:
        What metrics.json holds: {"before": {"spearman", "pearson" on dev, "tasks": …} of the starting encoder,
        "after": the same of the saved one, "steps", "seconds", what the loop cost (see CostMeter), "versions", …}.

    Raises:
        ValueError: a setting that cannot be, or an output that holds another run's files.
        FileNotFoundError: data or a model that is not there.
        FloatingPointError: a loss that is NaN or infinite; the message names the step and the batch's rows.
    """
    recipe = to_dict(SimpleNamespace(**locals()))
    blank = _checked(data, teacher, loss, training, output)
    folder, seed, has_dev = Path(str(output)), int(training.get("seed", 42)), bool(data.dev)
    settings = trainer_settings(training, folder, device=model.device, has_dev=has_dev)
    join(settings)
    if (finished := in_first(lambda: claim(folder, recipe, overwrite))) is not None:
        print(f"{folder} is finished; nothing to do")
        return finished

    import torch
    from transformers import set_seed

    from raoe_train.losses.reads import SENTENCES_ALONE
    from raoe_train.training.cost_meter import CostMeter
    from raoe_train.training.training_data import read_training_data

    started = time.time()
    set_seed(seed)
    datasets, texts = read_training_data(
        data, blank, seed, prompt=model.prompt, teacher=teacher, cache=folder / TEACHER
    )
    encoder = starting_encoder(model, folder / INITIAL, texts, seed)
    evaluator = dev_evaluator(data, model.prompt, evaluation.batch_size)

    def tasks() -> dict[str, Any]:
        if not evaluation.tasks:
            return {}
        asked = {"prompt": model.prompt, "polarity": polarity_of(polarity, model)}
        return evaluate_encoder(encoder, evaluation.tasks, data.dir, evaluation.batch_size, **asked)

    before = {**dev_metrics(evaluator, encoder), **(tasks() if evaluation.before else {})}
    if blank.reads is SENTENCES_ALONE:
        from raoe_train.training.language_model import language_model_trainer

        plain = trainer_settings(training, folder, device=model.device, has_dev=False)
        trainer, own = language_model_trainer(encoder, datasets, plain)
    else:
        trainer = _trainer(encoder, datasets, loss, teacher, settings, evaluator, training.get("patience"), data)
        own = lambda: {"scale": trainer.scales}  # noqa: E731
    backends = _backends(encoder.device)
    print(f"raoe_kernels backends for {encoder.device.type}: {', '.join(backends)}", flush=True)
    trainer.add_callback(log_writer(folder / "log.jsonl"))
    meter = CostMeter(encoder.device)
    trainer.add_callback(meter)
    checkpoint = in_first(lambda: newest_checkpoint(folder / CHECKPOINTS))
    if checkpoint is not None:
        print(f"going on from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    metrics: dict[str, Any] = {
        "before": before,
        "after": {**dev_metrics(evaluator, encoder), **tasks()},
        **own(),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "best_step": trainer.state.best_global_step,
        "seconds": round(time.time() - started, 1),
        **meter.costs(),
        "pairs": {name: len(dataset) for name, dataset in datasets.items()},
        "backends": backends,
        "versions": versions(),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "processes": rank_and_world()[1],
    }

    def save() -> dict[str, Any]:
        encoder.save_pretrained(str(folder))
        _plot(trainer.state.log_history, folder / "run.png")
        write_json(folder / "metrics.json", metrics)
        clear_unfinished(folder)  # there is nothing to resume
        print(f"{summary(metrics)}\nsaved to {folder}")
        return metrics

    return in_first(save)


def polarity_of(polarity: Polarity, model: Model) -> Polarity:
    """polarity, its reference the encoder that training starts from where the recipe names none."""
    from raoe_train.encoders.load import SCRATCH

    if polarity.reference.name or model.random_weights or model.name == SCRATCH:
        return polarity
    return replace(polarity, reference=replace(polarity.reference, name=model.name))


def _checked(data: Data, teacher: Teacher, loss: dict[str, Any], training: dict[str, Any], output: str | None) -> Any:
    """The loss, on no model; ValueError for what cannot be, before anything is read."""
    from raoe_train.losses.reads import LISTS
    from raoe_train.losses.registry import LOSSES, asks_teacher, make_loss

    if not output:
        raise ValueError("--output is missing: the directory to write to")
    if not data.train:
        raise ValueError("--data.train is missing: the pairs to train on")
    blank = make_loss(loss)
    if blank.reads is LISTS:
        check_teacher(teacher)
    elif asks_teacher(LOSSES[loss["name"]]):
        if teacher.name is None:
            raise ValueError(f"--teacher.name is missing: the encoder that loss {loss['name']} learns from")
    elif teacher.name is not None or data.shuffle_lists:
        print(f"loss {loss['name']} has no teacher and no lists: teacher and data.shuffle_lists ignored")
    check_training(training, bool(data.dev))
    scale = data.score_scale
    if scale and len(scale) not in (2, 2 * len(data.train)):
        raise ValueError(f"data.score_scale takes 2 numbers, or 2 for each of data.train's sources; got {scale}")
    return blank


def _trainer(
    encoder: Any, datasets: Any, loss: Any, teacher: Teacher, settings: Any, evaluator: Any, patience: Any, data: Data
) -> Any:
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers.trainer_callback import EarlyStoppingCallback

    from raoe_train.losses.registry import LOSSES, asks_teacher, make_loss
    from raoe_train.training.trainer import Trainer
    from raoe_train.training.training_data import check_sizes

    args = SentenceTransformerTrainingArguments(**for_all_processes(settings))
    if args.dataloader_drop_last:
        check_sizes(datasets, args.train_batch_size, rank_and_world()[1])
    embed = None
    if asks_teacher(LOSSES[loss["name"]]):
        embed = embedder(teacher, "teacher")
        embed(["."])  # loads it: that is to be no part of the first step's time
    made = make_loss(loss, encoder, embed)
    trainer = Trainer(encoder, args, datasets, loss=made, evaluator=evaluator, cache_dir=data.cache_dir)
    if patience is not None:
        trainer.add_callback(EarlyStoppingCallback(int(patience)))
    return trainer


def _backends(device: Any) -> list[str]:
    """The backends that raoe_kernels has for the losses on this device, the preferred one first."""
    import raoe_kernels

    have = raoe_kernels.backends(device)["raoe_loss"]
    return [name for name in ("native", "triton", "scan", "reference") if have.get(name) is True]


def _plot(log_history: list[dict[str, Any]], path: Path) -> None:
    try:
        from raoe_train.training.plot import plot_run

        plot_run(log_history, path)
    except ImportError as error:
        logger.warning("no %s: %s", path.name, error)
