"""The job `train`: a recipe run on raoe_train.training.trainer.Trainer, resumable, leaving one directory."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from raoe_train.artifacts.figures import pictures
from raoe_train.artifacts.processes import first_speaks, in_first, rank_and_world
from raoe_train.artifacts.provenance import commit, versions
from raoe_train.artifacts.writing import write_json
from raoe_train.data.settings import Data
from raoe_train.encoders.interpolation import best_between, weights_of
from raoe_train.encoders.named import SCRATCH, Model
from raoe_train.evaluation.tasks import Polarity, evaluate_tasks
from raoe_train.jobs.shared import job
from raoe_train.recipe import Option
from raoe_train.training.account import in_words, plot_changes
from raoe_train.training.arguments import trainer_settings
from raoe_train.training.list_targets import Teacher
from raoe_train.training.measures import Evaluation, dev_evaluator, dev_metrics, summary, tasks_of
from raoe_train.training.run_directory import (
    CHECKPOINTS,
    EVENTS,
    INITIAL,
    TEACHER,
    begin,
    claim,
    clear_unfinished,
    keep_events,
    log_writer,
    made_from,
    newest_checkpoint,
    starting_encoder,
)

LOSS = Option(convert="raoe_train.losses.registry:loss_settings", keys="raoe_train.losses.registry:loss_keys")


@job(together=True)
@first_speaks()
def train(
    model: Annotated[Model, Option(word="name")] = Model(),
    data: Annotated[Data, Option()] = Data(),
    teacher: Annotated[Teacher, Option(word="name")] = Teacher(),
    loss: Annotated[dict[str, Any], LOSS] = {},
    training: Annotated[
        dict[str, Any],
        Option(
            convert="raoe_train.training.arguments:training_settings",
            keys="raoe_train.training.arguments:training_keys",
        ),
    ] = {},
    evaluation: Annotated[Evaluation, Option()] = Evaluation(),
    polarity: Annotated[Polarity, Option()] = Polarity(),
    output: Annotated[str | None, "directory for model, recipe.yaml, metrics.json, log.jsonl, run.png"] = None,
    overwrite: Annotated[bool, "replace what another recipe left in output"] = False,
    dry_run: Annotated[bool, "say what it would take, steps, memory, hours, without weights and output"] = False,
) -> dict[str, Any]:
    """Train an encoder on scored pairs.

    Or on triplets, labelled pairs, lists, whatever the loss reads. The encoder is saved in the directory `output`, with
    recipe.yaml, metrics.json, log.jsonl and run.png. Run again with the same settings it goes on where it stopped; a
    finished run is returned at once. Under torchrun or accelerate all processes train together; the first writes.

    Returns:
        What metrics.json holds: {"before": {"spearman", "pearson" on dev, "tasks": …} of the starting encoder,
        "after": the same of the saved one, "steps", "seconds", what the loop cost (see CostMeter), "versions", …}.

    Raises:
        ValueError: a setting that cannot be, or an output that holds another run's files.
        FileNotFoundError: data or a model that is not there.
        FloatingPointError: a loss that is NaN or infinite; the message names the step and the batch's rows.
    """
    asked = SimpleNamespace(**locals())
    if not output and not dry_run:
        raise ValueError("--output is missing: the directory to write to")

    import torch
    from transformers import set_seed

    from raoe_train.encoders.sizes import check_fits
    from raoe_train.losses.reads import SENTENCES_ALONE
    from raoe_train.training.build import build_trainer, checked_loss
    from raoe_train.training.dry_run import would_take
    from raoe_train.training.model_card import save_with_card
    from raoe_train.training.training_data import enough_steps, read_training_data, with_dev

    blank = checked_loss(data, teacher, loss, training)
    if training.get("interpolate") is not None and model.lora:
        raise ValueError("training.interpolate is for weights that are all trained: leave model.lora out")
    folder, seed, least = Path(output or ""), int(training.get("seed", 42)), training.get("min_steps", 0)
    # a language model is not chosen by it
    has_dev = bool(data.dev or data.dev_share) and blank.reads is not SENTENCES_ALONE
    settings = trainer_settings(training, folder, device=model.device, has_dev=has_dev)
    tasks = tasks_of(evaluation, data, model, polarity)
    if dry_run:
        return would_take(asked, blank, settings)
    check_fits(model)
    made: dict[str, Any] = {}

    def claimed() -> dict[str, Any] | None:
        made.update(made_from(asked, tasks))
        return claim(asked, made)

    if (finished := in_first(claimed)) is not None:
        print(f"{folder} is finished; nothing to do")
        return finished
    started = time.time()
    set_seed(seed)
    datasets, texts = read_training_data(
        data, blank, seed, prompt=model.prompt, teacher=teacher, cache=folder / TEACHER
    )
    datasets, dev = with_dev(datasets, data, model.prompt, seed)
    evaluator = dev_evaluator(dev, evaluation.batch_size)
    start = functools.partial(starting_encoder, model, folder / INITIAL, texts, seed)
    loaded = None if model.name == SCRATCH else start()
    in_first(lambda: begin(asked, made))  # here, and not before, a run that is to be overwritten goes
    encoder = start() if loaded is None else loaded

    def measured(tasks: dict[str, Any]) -> dict[str, Any]:
        found = dev_metrics(evaluator, encoder)
        return {**found, **evaluate_tasks(encoder, tasks, evaluation.batch_size)} if tasks else found

    before = measured(tasks if evaluation.before else {})
    first = weights_of(encoder) if training.get("interpolate") else None
    trainer, own = build_trainer(
        encoder,
        datasets,
        loss,
        teacher,
        enough_steps(settings, datasets, least, data),
        evaluator=evaluator,
        patience=training.get("patience"),
        by_length=training.get("by_length", True),
        keep=training.get("keep", 0.0),
        cache_dir=data.cache_dir,
    )
    backends = _backends(encoder.device)
    print(f"raoe_kernels backends for {encoder.device.type}: {', '.join(backends)}", flush=True)
    trainer.add_callback(log_writer(folder / "log.jsonl"))
    keep_events(trainer, folder / EVENTS)
    checkpoint = in_first(lambda: newest_checkpoint(folder / CHECKPOINTS, settings.get("save_only_model", False)))
    if checkpoint is not None:
        print(f"going on from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    between: dict[str, Any] = {}
    if first is not None:
        last, weights = weights_of(encoder), training["interpolate"]
        weight, curve = best_between(
            encoder, first, last, weights, lambda: {"dev": dev_metrics(evaluator, encoder)["spearman"]}
        )
        between = {"interpolation": {"weight": weight, "curve": curve}}
    metrics: dict[str, Any] = {
        "before": before,
        "after": measured(tasks),
        **own(),
        **between,
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "best_step": trainer.state.best_global_step,
        "seconds": round(time.time() - started, 1),
        **trainer.meter.costs(),
        "pairs": {name: len(dataset) for name, dataset in datasets.items()},
        "backends": backends,
        "versions": versions(),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "processes": rank_and_world()[1],
    }

    def save() -> dict[str, Any]:
        log = trainer.state.log_history
        plots = pictures(lambda: [*_plot(log, folder / "run.png"), *plot_changes(metrics, folder / "changes.png")])
        save_with_card(encoder, folder, metrics, plots)
        write_json(folder / "metrics.json", metrics)
        clear_unfinished(folder)  # there is nothing to resume
        print("\n".join(filter(None, [summary(metrics), *in_words(metrics), f"saved to {folder}"])))
        return metrics

    return in_first(save)


def _backends(device: Any) -> list[str]:
    """The backends that raoe_kernels has for the losses on this device, the preferred one first."""
    import raoe_kernels

    have = raoe_kernels.backends(device)["raoe_loss"]
    return [name for name in ("native", "triton", "scan", "reference") if have.get(name) is True]


def _plot(log_history: list[dict[str, Any]], path: Path) -> list[Path]:
    from raoe_train.training.plot import plot_run

    plot_run(log_history, path)
    return [path]
