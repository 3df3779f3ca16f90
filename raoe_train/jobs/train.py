"""``raoe-train train``: a recipe run on SentenceTransformerTrainer, resumable, leaving one directory."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from raoe_train.artifacts.processes import first_speaks, in_first, rank_and_world
from raoe_train.artifacts.provenance import commit, versions
from raoe_train.artifacts.writing import partial, write_json
from raoe_train.config import TRAINING_NAMES, TrainConfig
from raoe_train.data.conditional import read_scored
from raoe_train.data.tokens import with_tokens
from raoe_train.encoders.named import FrozenEncoder
from raoe_train.evaluation.tasks import Polarity
from raoe_train.losses.registry import CAUSAL_LM, LOSSES, OF_BATCHES, check_loss, make_losses, reads
from raoe_train.training.list_targets import check_teacher
from raoe_train.training.run_directory import (
    CHECKPOINTS,
    INITIAL,
    claim_output,
    clear_unfinished,
    log_writer,
    newest_checkpoint,
)
from raoe_train.training.training_data import read_training_data

logger = logging.getLogger(__name__)

# What other names for training arguments mean, and keys of `training` that are ours.
SHORT_NAMES = {short: long for long, short in TRAINING_NAMES.items()}
OWN_KEYS = ("patience",)
DEV_METRIC = "eval_dev_spearman_cosine"


def train(config: TrainConfig) -> dict[str, Any]:
    """Train an encoder and save it, with recipe.yaml, metrics.json, log.jsonl and run.png, in
    ``config.output``.

    Run again with the same configuration it goes on where it stopped; a finished run is returned at once. Under
    torchrun or accelerate all processes train together; the first writes and prints.

    Returns:
        What metrics.json holds: {"before": {"spearman", "pearson" on dev, "tasks": …} of the starting
        encoder, "after": the same of the saved one, "steps", "seconds", what the loop cost (see CostMeter),
        "versions", …}.

    Raises:
        ValueError: a setting that cannot be, or an output that holds another run's files.
        FileNotFoundError: data or a model that is not there.
        FloatingPointError: a loss that is NaN or infinite; the message names the step and the batch's rows.
    """
    with first_speaks():
        _check(config)
        return _train(config, Path(config.output or ""))


def _train(config: TrainConfig, output: Path) -> dict[str, Any]:
    _join(_settings(config, has_dev=False))
    finished = in_first(lambda: claim_output(output, config))
    if finished is not None:
        print(f"{output} is finished; nothing to do")
        return finished

    import torch
    from transformers import set_seed

    from raoe_train.training.cost_meter import CostMeter

    started = time.time()
    seed = int(config.training.get("seed", 42))
    set_seed(seed)
    datasets, texts = read_training_data(config, seed)
    model = _starting_encoder(config, output / INITIAL, texts, seed)
    evaluator = _dev_evaluator(config)
    before = _dev_metrics(evaluator, model)
    if config.evaluation.before:
        before.update(_tasks(config, model))
    trainer, own = (_language_model if config.loss.name == CAUSAL_LM else _encoder_trainer)(
        config, model, datasets, evaluator, seed
    )
    print(f"raoe_kernels backends for {model.device.type}: {', '.join(_backends(model.device))}", flush=True)
    trainer.add_callback(log_writer(output / "log.jsonl"))
    meter = CostMeter(model.device)
    trainer.add_callback(meter)
    checkpoint = in_first(lambda: newest_checkpoint(output / CHECKPOINTS))
    if checkpoint is not None:
        print(f"going on from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    metrics: dict[str, Any] = {
        "before": before,
        "after": {**_dev_metrics(evaluator, model), **_tasks(config, model)},
        **own(),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "best_step": trainer.state.best_global_step,
        "seconds": round(time.time() - started, 1),
        **meter.costs(),
        "pairs": {name: len(dataset) for name, dataset in datasets.items()},
        "backends": _backends(model.device),
        "versions": versions(),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "processes": rank_and_world()[1],
    }

    def save() -> dict[str, Any]:
        model.save_pretrained(str(output))
        _plot(trainer.state.log_history, output / "run.png")
        write_json(output / "metrics.json", metrics)
        clear_unfinished(output)  # there is nothing to resume
        print(f"{_summary(metrics)}\nsaved to {output}")
        return metrics

    return in_first(save)


def _join(settings: dict[str, Any]) -> None:
    """Start the group of torchrun's processes, before the trainer does it: they agree on things before there is one."""
    if rank_and_world()[1] > 1:
        from transformers import TrainingArguments

        keys = ("output_dir", "use_cpu", "ddp_backend", "ddp_timeout")
        _ = TrainingArguments(**{key: settings[key] for key in keys if key in settings}).device


def _starting_encoder(config: TrainConfig, initial: Path, texts: Iterable[str], seed: int) -> Any:
    """The encoder before training; one made from scratch is kept in `initial`, for a run that goes on."""
    from raoe_train.encoders.load import SCRATCH, load_encoder

    if config.model.name != SCRATCH:
        return load_encoder(config.model, sentences=texts, seed=seed, train=True)
    made: list[Any] = []

    def make() -> None:
        if (initial / "modules.json").is_file():
            return
        made.append(load_encoder(config.model, sentences=texts, seed=seed, train=True))
        made[0].save_pretrained(str(partial(initial)), create_model_card=False)
        shutil.rmtree(initial, ignore_errors=True)
        partial(initial).replace(initial)  # in one step: half of a tokenizer would be another one

    # the other processes cannot make it: in a process group, transformers saves nothing for them, where making it does
    in_first(make)
    if made:
        return made[0]
    return load_encoder(dataclasses.replace(config.model, name=str(initial)), sentences=texts, seed=seed, train=True)


def _encoder_trainer(
    config: TrainConfig, model: Any, datasets: Any, evaluator: Any, seed: int
) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """(sentence-transformers' trainer for the recipe's loss, what metrics.json says of it)."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from transformers.trainer_callback import EarlyStoppingCallback

    from raoe_train.training.stop_at_nan import stopping

    # the encoder's own; the trainer's collator does not look there
    prompts = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
    settings = _settings(config, has_dev=evaluator is not None)
    world = rank_and_world()[1]
    if world > 1:
        # Batches are drawn for all processes together and then cut. Drawn for each, those of one step would be of
        # different sources, whose scores cannot be compared, and would depend on the number of processes.
        settings["per_device_train_batch_size"] = world * int(settings.get("per_device_train_batch_size", 8))
        settings["accelerator_config"] = {**(settings.get("accelerator_config") or {}), "split_batches": True}
    args: Any = SentenceTransformerTrainingArguments(prompts=prompts, **settings)
    if args.dataloader_drop_last:
        _check_sizes(datasets, args.train_batch_size, world)
    lists, ours = reads(config.loss.name) == "lists", LOSSES[config.loss.name].ours is not None
    if args.gradient_accumulation_steps > 1 and not lists and (ours or config.loss.name in OF_BATCHES):
        logger.warning(
            "gradient accumulation does not enlarge the batch that pairs are ranked, or negatives drawn, in; "
            "loss.mini_batch_size does, at the same memory"
        )
    collator = _collator(config.loss.name)(
        preprocess_fn=with_tokens(model, datasets, config.data.cache_dir, args.prompts),
        prompts=args.prompts,
        router_mapping=args.router_mapping,
    )
    losses, scales = make_losses(config.loss, model, datasets, args.train_batch_size // world, seed, config.teacher)
    tau = " and ".join(f"{scale:g}" for scale in dict.fromkeys(scales.values()))
    trainer = stopping(SentenceTransformerTrainer, [f"a smaller loss.scale (now {tau})"] if tau else [])(
        model=model,
        args=args,
        train_dataset=datasets,
        loss=losses,
        evaluator=evaluator,
        data_collator=collator,
    )
    if config.training.get("patience") is not None:
        trainer.add_callback(EarlyStoppingCallback(int(config.training["patience"])))
    return trainer, lambda: {"scale": scales}


def _check_sizes(datasets: Any, batch_size: int, world: int) -> None:
    """ValueError for a source without one whole batch, of which nothing would be trained on."""
    for name, dataset in datasets.items():
        if len(dataset) < batch_size:
            of = f"{world} processes x {batch_size // world}" if world > 1 else f"{batch_size}"
            raise ValueError(
                f"{name} has {len(dataset)} rows, less than a batch of {of}, and incomplete batches are dropped: "
                "make training.batch_size smaller"
            )


def _collator(loss: str) -> Any:
    """The class of collators that a loss needs."""
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    from raoe_train.losses.collators import ListCollator, ScoreLabelCollator, TextCollator

    if LOSSES[loss].ours is None:
        return SentenceTransformerDataCollator
    if LOSSES[loss].teacher:
        return TextCollator
    own = {"lists": ListCollator, "scored pairs": ScoreLabelCollator}
    return own.get(reads(loss), SentenceTransformerDataCollator)


def _language_model(
    config: TrainConfig, model: Any, datasets: Any, evaluator: Any, seed: int
) -> tuple[Any, Callable[[], dict[str, Any]]]:
    from raoe_train.training.language_model import language_model_trainer

    settings = _settings(config, has_dev=False)
    return language_model_trainer(model, datasets, settings)


def _check(config: TrainConfig) -> None:
    if not config.output:
        raise ValueError("--output is missing: the directory to write to")
    if not config.data.train:
        raise ValueError("--data.train is missing: the pairs to train on")
    check_loss(config.loss)
    if reads(config.loss.name) == "lists":
        check_teacher(config.teacher)
    elif LOSSES[config.loss.name].teacher:
        if config.teacher.name is None:
            raise ValueError(f"--teacher.name is missing: the encoder that loss {config.loss.name} learns from")
    elif config.teacher.name is not None or config.data.shuffle_lists:
        print(f"loss {config.loss.name} has no teacher and no lists: teacher and data.shuffle_lists ignored")
    if config.training.get("patience") is not None and not config.data.dev:
        raise ValueError("training.patience needs data.dev to see whether the model still improves")
    if config.training.get("eval_strategy", "no") != "no" and not config.data.dev:
        raise ValueError(
            f"training.eval_strategy {config.training['eval_strategy']} needs data.dev to evaluate on; "
            "without it the last model is kept: --training.eval_strategy no"
        )
    scale = config.data.score_scale
    if scale and len(scale) not in (2, 2 * len(config.data.train)):
        raise ValueError(f"data.score_scale takes 2 numbers, or 2 for each of data.train's sources; got {scale}")

    from sentence_transformers import SentenceTransformerTrainingArguments

    known = {field.name for field in dataclasses.fields(SentenceTransformerTrainingArguments) if field.init}
    for key in config.training:
        if key not in known and key not in SHORT_NAMES and key not in OWN_KEYS:
            close = difflib.get_close_matches(key, [*known, *SHORT_NAMES, *OWN_KEYS], n=1, cutoff=0.5)
            hint = f" (did you mean training.{close[0]}?)" if close else ""
            raise ValueError(f"unknown key training.{key}{hint}")
        if key == "output_dir":
            raise ValueError("training.output_dir is output/checkpoints; set output")


def _settings(config: TrainConfig, *, has_dev: bool) -> dict[str, Any]:
    """Training arguments: the recipe's, over our defaults."""
    import torch

    given = {SHORT_NAMES.get(key, key): value for key, value in config.training.items() if key not in OWN_KEYS}
    when = given.get("eval_strategy", "epoch" if has_dev else "no")
    settings: dict[str, Any] = {
        "seed": 42,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # a run stops there; see raoe_train.training.stop_at_nan
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
        "eval_strategy": when,
        # A checkpoint for each evaluation, so that the best model is one that was kept.
        "save_strategy": when if when != "no" else "epoch",
        "save_steps": given.get("eval_steps", 500),
        "save_total_limit": 2,
        "load_best_model_at_end": has_dev and when != "no",
        "metric_for_best_model": DEV_METRIC if has_dev else None,
        "greater_is_better": True if has_dev else None,
        "dataloader_drop_last": rank_and_world()[1] > 1,  # the trainer would; unequal batches hang
        "dataloader_pin_memory": torch.cuda.is_available(),
        # transformers takes bf16 on a CPU only where it is told that the CPU is meant.
        "use_cpu": config.model.device == "cpu" or not torch.accelerator.is_available(),
        "restore_callback_states_from_checkpoint": config.training.get("patience") is not None,
        **given,
    }
    return {"output_dir": str(Path(config.output or "", CHECKPOINTS)), **settings}


def _dev_evaluator(config: TrainConfig) -> Any:
    if not config.data.dev:
        return None
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    data = config.data
    pairs = read_scored(str(data.dev), config.model.prompt, columns=data.columns or None, on_error=data.on_error)
    return EmbeddingSimilarityEvaluator(
        pairs["sentence1"][:],
        pairs["sentence2"][:],
        pairs["score"][:],
        batch_size=config.evaluation.batch_size,
        main_similarity="cosine",
        similarity_fn_names=["cosine"],
        name="dev",
        write_csv=False,
    )


def _dev_metrics(evaluator: Any, model: Any) -> dict[str, float | None]:
    """Correlations x 100, as evaluate_encoder gives them; None where all cosines are equal."""
    if evaluator is None:
        return {}
    found = evaluator(model)
    values = {name: 100 * float(found[f"dev_{name}_cosine"]) for name in ("spearman", "pearson")}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _tasks(config: TrainConfig, model: Any) -> dict[str, Any]:
    if not config.evaluation.tasks:
        return {}
    from raoe_train.evaluation.tasks import evaluate_encoder

    data, evaluation = config.data, config.evaluation
    return evaluate_encoder(
        model,
        evaluation.tasks,
        data.dir,
        evaluation.batch_size,
        prompt=config.model.prompt,
        polarity=polarity_of(config),
    )


def polarity_of(config: TrainConfig) -> Polarity:
    """polarity, its reference the encoder that training starts from where the recipe names none."""
    from raoe_train.encoders.load import SCRATCH

    started = config.model.random_weights or config.model.name == SCRATCH
    name = config.polarity.reference or (None if started else config.model.name)
    return Polarity(**{**vars(config.polarity), "reference": FrozenEncoder(name=name)})


def _summary(metrics: dict[str, Any]) -> str:
    """Scores x 100 before and after, a line for dev and each task's main metric, and for S of a polarity task."""
    from raoe_train.evaluation.tasks import main_score

    before, after = metrics["before"], metrics["after"]
    found = {"dev": [before.get("spearman"), after.get("spearman")]} if "spearman" in after else {}
    for task, scores in after.get("tasks", {}).items():
        sides = [of.get("tasks", {}).get(task, {}) for of in (before, after)]
        found[task] = [main_score(side) for side in sides]
        if "similarity" in scores:
            found[f"{task} (S)"] = [side.get("similarity") for side in sides]
    rows: list[tuple[str, ...]] = [("main metric x 100", "before", "after")]
    for name, values in found.items():
        rows.append((name, *("-" if value is None else f"{value:.2f}" for value in values)))
    width = max(24, *(len(name) for name, *_ in rows))
    return "\n".join(f"{name:<{width}}{first:>8}{second:>8}" for name, first, second in rows)


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
