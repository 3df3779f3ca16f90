"""``raoe-train train``: a recipe run on SentenceTransformerTrainer, resumable, leaving one directory."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from raoe_train.config import TRAINING_NAMES, TrainConfig
from raoe_train.data.files import write_json
from raoe_train.provenance import versions
from raoe_train.run_directory import claim_output, commit, last_checkpoint, log_writer

logger = logging.getLogger(__name__)

# What other names for training arguments mean, and keys of `training` that are ours.
SHORT_NAMES = {short: long for long, short in TRAINING_NAMES.items()}
OWN_KEYS = ("patience",)
# loss.name: (class in raoe_train.losses, keys of LossConfig that it takes)
LOSSES = {
    "raoe": ("RAOELoss", ("margin", "ties", "gate", "rank_weight", "angle_weight")),
    "rank_margin": ("RankMarginLoss", ("margin", "ties")),
    "gated_angular": ("GatedAngularLoss", ("gate",)),
    "cosent": ("CoSENTLoss", ()),
    "angle": ("AnglELoss", ()),
    "mse": (None, ()),
}
AUTO = "auto"  # of loss.scale
DEV_METRIC = "eval_dev_spearman_cosine"


def train(config: TrainConfig) -> dict[str, Any]:
    """Train an encoder and save it, with recipe.yaml, metrics.json, log.jsonl and run.png, in
    ``config.output``.

    Run again with the same configuration it goes on where it stopped; a finished run is returned at once.

    Returns:
        What metrics.json holds: {"before": {"spearman", "pearson" on dev, "tasks": …} of the starting
        encoder, "after": the same of the saved one, "steps", "seconds", "versions", …}.

    Raises:
        ValueError: a setting that cannot be, or an output that holds another run's files.
        FileNotFoundError: data or a model that is not there.
    """
    _check(config)
    output = Path(config.output or "")
    finished = claim_output(output, config)
    if finished is not None:
        print(f"{output} is finished; nothing to do")
        return finished

    import torch
    from sentence_transformers import SentenceTransformerTrainer
    from transformers import set_seed
    from transformers.trainer_callback import EarlyStoppingCallback

    from raoe_train.collator import ScoreLabelCollator
    from raoe_train.encoder import SCRATCH, load_encoder

    started = time.time()
    taken = LOSSES[config.loss.name][1]
    given = [key for key in LOSSES["raoe"][1] if getattr(config.loss, key) is not None and key not in taken]
    if given:
        print(f"loss {config.loss.name} has no {', '.join(given)}: ignored")
    seed = int(config.training.get("seed", 42))
    set_seed(seed)
    datasets, texts = _read_training_data(config, seed)
    initial = output / "initial"
    model_config = config.model
    if config.model.name == SCRATCH and (initial / "modules.json").is_file():
        model_config = dataclasses.replace(config.model, name=str(initial))
    model = load_encoder(model_config, sentences=texts, seed=seed)
    if model_config.name == SCRATCH:
        model.save_pretrained(str(initial), create_model_card=False)
    evaluator = _dev_evaluator(config)
    args = _arguments(config, output, has_dev=evaluator is not None)
    collator = ScoreLabelCollator(
        preprocess_fn=model.preprocess, prompts=args.prompts, router_mapping=args.router_mapping
    )
    chosen_losses, scales = _losses(config, model, datasets, args.train_batch_size, seed)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=datasets,
        loss=chosen_losses,
        evaluator=evaluator,
        data_collator=None if config.loss.name == "mse" else collator,
        callbacks=[log_writer(output / "log.jsonl")],
    )
    if config.training.get("patience") is not None:
        trainer.add_callback(EarlyStoppingCallback(int(config.training["patience"])))
    before = _dev_metrics(evaluator, model)
    if config.evaluation.before:
        before.update(_tasks(config, model))
    print(f"raoe_kernels backends for {model.device.type}: {', '.join(_backends(model.device))}", flush=True)
    trainer.train(resume_from_checkpoint=last_checkpoint(Path(args.output_dir)))
    metrics: dict[str, Any] = {
        "before": before,
        "after": {**_dev_metrics(evaluator, model), **_tasks(config, model)},
        "scale": scales,
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "best_step": trainer.state.best_global_step,
        "seconds": round(time.time() - started, 1),
        "pairs": {name: len(dataset) for name, dataset in datasets.items()},
        "backends": _backends(model.device),
        "versions": versions(),
        "commit": commit(),
        "threads": torch.get_num_threads(),
    }
    if not trainer.is_world_process_zero():
        return metrics
    model.save_pretrained(str(output))
    _plot(trainer.state.log_history, output / "run.png")
    write_json(output / "metrics.json", metrics)
    for folder in (args.output_dir, initial):  # the run is finished: nothing to resume
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{_summary(metrics)}\nsaved to {output}")
    return metrics


def _check(config: TrainConfig) -> None:
    if not config.output:
        raise ValueError("--output is missing: the directory to write to")
    if not config.data.train:
        raise ValueError("--data.train is missing: the pairs to train on")
    if config.loss.name not in LOSSES:
        raise ValueError(f"loss.name must be one of {', '.join(LOSSES)}, got {config.loss.name!r}")
    if config.loss.name == "mse" and (config.loss.mini_batch_size or config.loss.gather_across_devices):
        raise ValueError(
            "loss.mini_batch_size and loss.gather_across_devices mean nothing to mse, a mean over pairs"
        )
    tau = config.loss.scale
    if tau != AUTO and not (
        isinstance(tau, (int, float)) and not isinstance(tau, bool) and 0 < tau < math.inf
    ):
        raise ValueError(f"loss.scale must be a number > 0 or {AUTO!r}, got {tau!r}")
    if config.training.get("patience") is not None and not config.data.dev:
        raise ValueError("training.patience needs data.dev to see whether the model still improves")
    scale = config.data.score_scale
    if scale and len(scale) not in (2, 2 * len(config.data.train)):
        raise ValueError(
            f"data.score_scale takes 2 numbers, or 2 for each of data.train's sources; got {scale}"
        )

    from sentence_transformers import SentenceTransformerTrainingArguments

    known = {field.name for field in dataclasses.fields(SentenceTransformerTrainingArguments) if field.init}
    for key in config.training:
        if key not in known and key not in SHORT_NAMES and key not in OWN_KEYS:
            close = difflib.get_close_matches(key, [*known, *SHORT_NAMES, *OWN_KEYS], n=1, cutoff=0.5)
            hint = f" (did you mean training.{close[0]}?)" if close else ""
            raise ValueError(f"unknown key training.{key}{hint}")
        if key == "output_dir":
            raise ValueError("training.output_dir is output/checkpoints; set output")


def _needs_label(config: TrainConfig) -> bool:
    return config.loss.name in ("raoe", "gated_angular") and config.loss.gate != "score"


def _read_training_data(config: TrainConfig, seed: int) -> tuple[Any, list[str]]:
    """(DatasetDict of one dataset a source, all sentences)."""
    from datasets import DatasetDict

    from raoe_train.data import read_pairs

    data, scale = config.data, config.data.score_scale
    require = ("score", "label") if _needs_label(config) else ("score",)
    datasets: dict[str, Any] = {}
    texts: list[str] = []
    for number, source in enumerate(data.train):
        lowest_highest = (scale[2 * number : 2 * number + 2] or scale[:2]) if scale else None
        pairs = read_pairs(
            source,
            columns=data.columns or None,
            labels=_labels_of(source, data.labels),
            score_scale=lowest_highest,
            on_error=data.on_error,
            require=require,
        )
        dataset = pairs.to_dataset().select_columns(["sentence1", "sentence2", *require])
        if data.max_rows is not None and len(dataset) > data.max_rows:
            dataset = dataset.shuffle(seed=seed).select(range(data.max_rows)).flatten_indices()
        if config.loss.name == "mse":
            dataset = _to_unit_scores(dataset, lowest_highest, source)
        name = _name_of(source)
        datasets[name if name not in datasets else f"{name} ({number + 1})"] = dataset
        texts += [*dataset["sentence1"], *dataset["sentence2"]]
        print(f"{source}: {len(dataset)} pairs{_counts(pairs)}")
    return DatasetDict(datasets), texts


def _name_of(source: str) -> str:
    """sick#train for …/sick.tsv.gz#train: torch allows no dot in the name of one of several losses."""
    file, mark, split = Path(source).name.partition("#")
    return file.split(".")[0] + mark + split.replace(".", "_")


def _labels_of(source: str, labels: dict[str, Any] | None) -> dict[str, int] | None:
    """The label map of a source: data.labels, or its entry for the file's name ("sick" of sick.tsv.gz)."""
    if labels and all(isinstance(entry, dict) for entry in labels.values()):
        return labels.get(Path(source).name.split(".")[0])
    return labels


def _counts(pairs: Any) -> str:
    dropped = (getattr(pairs, "counts", None) or {}).get("dropped") or {}
    return "".join(f", {number} dropped ({reason})" for reason, number in dropped.items())


def _to_unit_scores(dataset: Any, scale: list[float] | None, source: str) -> Any:
    scores = dataset["score"]
    if scale is None:
        if min(scores) < -1 or max(scores) > 1:
            raise ValueError(
                f"{source}: loss mse compares scores with cosines, and these run from {min(scores)} to "
                f"{max(scores)}; declare data.score_scale LOWEST HIGHEST"
            )
        return dataset
    lowest, highest = scale
    unit = [(score - lowest) / (highest - lowest) for score in scores]
    return dataset.remove_columns("score").add_column("score", unit)


def _losses(
    config: TrainConfig, model: Any, datasets: Any, batch_size: int, seed: int
) -> tuple[Any, dict[str, float]]:
    """(the loss, or one for each source, and tau by source).

    With loss.scale "auto" each source has its own tau: how sharply scores order pairs is a property of them.
    """
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MatryoshkaLoss

    import raoe_train.losses as losses
    from raoe_train.calibration import calibrate

    chosen, (name, keys) = config.loss, LOSSES[config.loss.name]

    def make(scale: float) -> Any:
        settings = {key: getattr(chosen, key) for key in keys if getattr(chosen, key) is not None}
        return getattr(losses, str(name))(
            model,
            scale=scale,
            mini_batch_size=chosen.mini_batch_size,
            gather_across_devices=chosen.gather_across_devices,
            **settings,
        )

    def wrapped(loss: Any) -> Any:
        return MatryoshkaLoss(model, loss, chosen.matryoshka_dims) if chosen.matryoshka_dims else loss

    if name is None:
        return wrapped(CosineSimilarityLoss(model)), {}
    if chosen.scale != AUTO:
        return wrapped(make(float(chosen.scale))), dict.fromkeys(datasets, float(chosen.scale))
    by_source, scales = {}, {}
    for source, dataset in datasets.items():
        loss = make(1.0)
        loss.scale, means = calibrate(model, loss, dataset, batch_size=batch_size, seed=seed)
        by_source[source], scales[source] = wrapped(loss), loss.scale
        at_20 = means[min(means, key=lambda tau: abs(tau - 20))]
        print(f"{source}: scale {loss.scale:g} (loss before training {means[loss.scale]:.2f}; at 20 {at_20:.2f})")
    return by_source, scales


def _arguments(config: TrainConfig, output: Path, *, has_dev: bool) -> Any:
    import torch
    from sentence_transformers import SentenceTransformerTrainingArguments

    given = {
        SHORT_NAMES.get(key, key): value for key, value in config.training.items() if key not in OWN_KEYS
    }
    when = given.get("eval_strategy", "epoch" if has_dev else "no")
    settings: dict[str, Any] = {
        "seed": 42,
        "logging_steps": 10,
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
        "dataloader_pin_memory": torch.cuda.is_available(),
        # transformers takes bf16 on a CPU only where it is told that the CPU is meant.
        "use_cpu": config.model.device == "cpu" or not torch.accelerator.is_available(),
        "prompts": config.model.prompt,
        "restore_callback_states_from_checkpoint": config.training.get("patience") is not None,
        **given,
    }
    if settings.get("gradient_accumulation_steps", 1) > 1 and config.loss.name != "mse":
        logger.warning(
            "gradient accumulation does not enlarge the batch that pairs are ranked in; "
            "loss.mini_batch_size does, at the same memory"
        )
    return SentenceTransformerTrainingArguments(output_dir=str(output / "checkpoints"), **settings)


def _dev_evaluator(config: TrainConfig) -> Any:
    if not config.data.dev:
        return None
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    from raoe_train.data import read_pairs

    pairs = read_pairs(
        config.data.dev,
        columns=config.data.columns or None,
        on_error=config.data.on_error,
        require=("score",),
    )
    return EmbeddingSimilarityEvaluator(
        pairs.sentence1,
        pairs.sentence2,
        pairs.score or [],
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
    from raoe_train.evaluation import evaluate_encoder

    return evaluate_encoder(model, config.evaluation.tasks, config.data.dir, config.evaluation.batch_size)


def _summary(metrics: dict[str, Any]) -> str:
    """Spearman x 100 before and after, a line for dev and each task."""
    rows: list[tuple[str, ...]] = [("Spearman x 100", "before", "after")]
    before, after = metrics["before"], metrics["after"]
    found = {"dev": [before.get("spearman"), after.get("spearman")]} if "spearman" in after else {}
    for task in after.get("tasks", {}):
        found[task] = [of.get("tasks", {}).get(task, {}).get("spearman") for of in (before, after)]
    for name, values in found.items():
        rows.append((name, *("-" if value is None else f"{value:.2f}" for value in values)))
    return "\n".join(f"{name:<24}{first:>8}{second:>8}" for name, first, second in rows)


def _backends(device: Any) -> list[str]:
    """The backends that raoe_kernels has for the losses on this device, the preferred one first."""
    import raoe_kernels

    have = raoe_kernels.backends(device)["raoe_loss"]
    return [name for name in ("native", "triton", "scan", "reference") if have.get(name) is True]


def _plot(log_history: list[dict[str, Any]], path: Path) -> None:
    try:
        from raoe_train.plots import plot_run

        plot_run(log_history, path)
    except ImportError as error:
        logger.warning("no %s: %s", path.name, error)
