"""The job `train`: run a recipe with raoe_train.training.trainer.Trainer. Interrupted runs resume."""

import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import EarlyStoppingCallback, set_seed

import raoe_kernels
from raoe_train.config import recipe_text
from raoe_train.data.sources import Texts
from raoe_train.encoders.embed import embedder, print_cut, remembered
from raoe_train.encoders.load import convert_parameters
from raoe_train.encoders.scratch import drop_head
from raoe_train.evaluation.tasks import Task, evaluate_tasks, read_tasks
from raoe_train.jobs.settings import TrainConfig
from raoe_train.jobs.shared import check_nodes, job, require
from raoe_train.jobs.train_settings import by_data, check_config
from raoe_train.outputs import Output, remove, set_modes, versions, write_json, write_text
from raoe_train.processes import on_rank_zero, print_on_rank_zero, rank_and_world
from raoe_train.settings import SCRATCH
from raoe_train.training import certificate, report
from raoe_train.training.arguments import for_encoder, trainer_arguments
from raoe_train.training.callbacks import Interruption, LogFile, write_events_to
from raoe_train.training.run_directory import (
    CHECKPOINTS,
    EVENTS,
    FILES,
    INITIAL,
    LOG,
    METRICS,
    PICTURE,
    RECIPE,
    REJECTED,
    TEACHER,
    complete_checkpoints,
    newest_checkpoint,
    save_with_card,
    starting_encoder,
)
from raoe_train.training.trainer import Trainer
from raoe_train.training.training_data import read_training_data, redraw, with_dev

STEPS = 4  # steps of a dry run; the first step is slower and is not timed


@job(together=True)
@print_on_rank_zero()
def train(config: TrainConfig, output: Output) -> dict[str, Any]:
    """Train an encoder on the data that its loss requires, such as scored pairs, triplets, labelled pairs or lists.

    The encoder is saved in the directory `output`, with recipe.yaml, metrics.json, log.jsonl and run.png. An
    interrupted run resumes when you start it again with the same settings. If the run is finished, only its result is
    returned. Under torchrun or accelerate, all processes train one encoder together.

    Returns:
        The content of metrics.json: {"before": {"spearman", "pearson" on the dev set (for rows: "ndcg@10", "recall@10",
        "mrr@10", "accuracy@1"), "tasks": …} before training, "after": the same keys for the saved encoder, "steps",
        "seconds", the keys of Meter.costs, "versions", …}.

    Raises:
        FloatingPointError: the loss is NaN or infinite. The message names the step and shows the rows of its batch.

    With evaluation.certificate, the result also contains "certificate", the content of certificate.json (see
    raoe_train.training.certificate.choose). The key "failed" is 1 if the certificate rejects the run or, without a
    certificate, if training lowered the dev score.
    """
    start_time = time.time()
    config, has_dev = by_data(config), bool(config.data.dev or config.data.dev_share)
    if config.evaluation.certificate == "auto":
        config = replace(config, evaluation=replace(config.evaluation, certificate=has_dev))
        if not has_dev:
            print("without a dev set, the trained encoder is saved even if it is worse than before training")
    check_config(config)
    require(config.model.name, "model.name", "the encoder to train")
    if not config.dry_run:
        require(config.output, "output", "the directory to write to")
    folder = Path(config.output or "").expanduser()
    arguments = trainer_arguments(config.training, folder, device=config.model.device, has_dev=has_dev)
    tasks = tasks_of(config)
    if config.dry_run:
        return estimate(config, arguments)
    run = prepare(config, arguments, tasks, output.path, output)
    before = run.evaluate(tasks if config.evaluation.before else {})
    if (value := before.get("spearman") or 0.0) < -20:
        print(f"warning: dev pairs with high scores have low cosines (spearman {value:.2f}): are the scores distances?")
    facts = facts_of(run)
    metrics = fit(run, before)
    trainer = run.trainer
    metrics |= {
        "scale": trainer.scales,
        "keep": trainer.keep,
        "steps": trainer.state.global_step * len(run.costs),
        "epochs": trainer.state.epoch,
        "seconds": round(time.time() - start_time, 1),
        **{key: (max if key.startswith("peak") else sum)(cost[key] for cost in run.costs) for key in run.costs[0]},
        **facts,
    }
    return on_rank_zero(lambda: save(run, metrics))


def tasks_of(config: TrainConfig) -> dict[str, Task]:
    """Read the evaluation tasks. The default reference for polarity tasks is the encoder before training."""
    evaluation, model, polarity = config.evaluation, config.model, config.polarity
    if not evaluation.tasks:
        return {}
    if polarity.reference is None and model.name != SCRATCH:
        start: Any = model  # all settings: pooling, prompt, length, revision …
        polarity = replace(polarity, reference=start)
    options: dict[str, Any] = {"prompt": model.prompt, "polarity": polarity, "classifier": evaluation.classifier}
    return read_tasks(evaluation.tasks, config.data.dir, **options)


@dataclass
class Run:
    """A training run: its settings, data and encoder."""

    config: TrainConfig
    output: Any  # None for a dry run
    arguments: Mapping[str, Any]  # keywords of SentenceTransformerTrainingArguments
    datasets: Any  # {name: training dataset}
    folds: list[Any]  # with folds, the training datasets without each dev set, else empty
    evaluator: Any  # evaluator of the dev sets, or None
    tasks: dict[str, Task]  # tasks to evaluate before and after training
    encoder: Any
    trainer: Trainer  # with folds, the trainer for the current fold
    costs: list[dict[str, Any]] = field(default_factory=list)  # costs of each training run (see Meter.costs)

    def evaluate(self, tasks: dict[str, Task], dev: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the encoder's metrics x 100 on the dev sets (averaged if there are several) and on the tasks. An
        undefined correlation is None. If `dev` is given, use these metrics instead of a dev evaluation."""
        metrics = dict(dev or {})
        results = self.evaluator(self.encoder) if self.evaluator and dev is None else {}
        for name, key in self.evaluator.metrics.items() if results else ():
            value = 100 * results[f"dev_{key}"]
            metrics[name] = None if math.isnan(value) else value
        if tasks:
            metrics |= evaluate_tasks(self.encoder, tasks, self.config.evaluation.batch_size)
        return metrics


def prepare(
    config: TrainConfig, arguments: dict[str, Any], tasks: dict[str, Task], folder: Path, output: Output | None = None
) -> Run:
    """Read the data, load the encoder and, except in a dry run, create the output. With `overwrite`, the earlier run is
    removed only after all inputs have been read. The teacher's cache and a new encoder are stored in `folder`."""

    def begin() -> None:
        if output is not None:
            output.begin(*FILES)
            write_text(output.path / RECIPE, recipe_text(config, ("output", "overwrite", "dry_run")))

    if output is not None:
        if not on_rank_zero(lambda: output.replaces):  # other ranks may read the record that rank 0 just wrote
            on_rank_zero(lambda: output.begin(*FILES))
        check_nodes(output)
    set_seed(config.training.seed)
    datasets, texts = read_training_data(config, cache=folder / TEACHER)
    datasets, dev, folds = with_dev(datasets, config)
    evaluator = None
    if dev:
        widths = config.loss.init_args.get("matryoshka_dims") or ()
        evaluator = report.DevEvaluator(dev, config.evaluation.batch_size, "dev", widths)
        arguments = {"metric_for_best_model": evaluator.primary_metric, **arguments}
    if config.model.name == SCRATCH:
        on_rank_zero(begin)  # first, because a new encoder is saved in the output
    encoder = starting_encoder(config.model, folder / INITIAL, texts, config.training.seed)
    arguments = for_encoder(config.training, arguments, encoder, datasets)
    if config.model.name != SCRATCH:
        on_rank_zero(begin)
    if folds:
        arguments |= {"eval_strategy": "no", "load_best_model_at_end": False, "save_total_limit": 1}
        arguments["output_dir"] = str(folder / CHECKPOINTS / "fold-1")
    trainer = build_trainer(config, arguments, encoder, folds[0] if folds else datasets, None if folds else evaluator)
    return Run(config, output, arguments, datasets, folds, evaluator, tasks, encoder, trainer)


def facts_of(run: Run) -> dict[str, Any]:
    """Print and return facts that are known before training, such as the backends and how many texts are truncated."""
    cut = {name: print_cut(run.encoder, prompted(run, name), name, "") for name in run.datasets}
    dev = run.evaluator.tasks if run.evaluator else {}
    cut |= {word: task.print_cut(run.encoder, word) for word, task in {**dev, **run.tasks}.items()}
    usable = raoe_kernels.backends(run.encoder.device)["raoe_loss"]
    backends = [name for name in ("native", "triton", "scan", "reference") if usable.get(name) is True]
    print(f"raoe_kernels backends for {run.encoder.device.type}: {', '.join(backends)}", flush=True)
    return {
        "truncated": cut,
        "pairs": {name: len(dataset) for name, dataset in run.datasets.items()},
        "backends": backends,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "processes": rank_and_world()[1],
    }


def prompted(run: Run, name: str) -> Iterator[str]:
    """Yield each text of a training dataset with its prompt."""
    prompts: Any = run.trainer.args.prompts or ""
    if isinstance(prompts, dict):
        prompts = prompts.get(name, prompts)
    for column in run.datasets[name].column_names:
        prompt = prompts.get(column) if isinstance(prompts, dict) else prompts
        for text in Texts({"": run.datasets[name].select_columns([column])}):
            yield (prompt or "") + text


def fit(run: Run, before: Mapping[str, Any]) -> dict[str, Any]:
    """Start or resume training, and load the selected weights into the encoder. Return {"before": metrics, "after":
    metrics, "best_step": step of the selected weights}, with the keys "certificate" and "failed" where they apply."""
    config, certified = run.config, run.config.evaluation.certificate
    start = certificate.weights_of(run.encoder) if certified or run.trainer.args.load_best_model_at_end else {}
    guard = certificate.guard_of(config.data, run.encoder, config.training.seed) if certified else None
    tried, result = train_all(run, start), dict[str, Any]()
    trainer, encoder = run.trainer, run.encoder
    if guard is not None:
        made = certificate.choose(trainer, start, tried, [*run.evaluator.tasks.values()], guard, config.evaluation)
        result |= {"certificate": made, "failed": int(not made["accepted"])}
        put = functools.partial(certificate.put, trainer, start, tried, made)
        if made["rejected"]:
            put(made["rejected"])
            on_rank_zero(lambda: keep_rejected(run, made))
        put(made["saved"])
    convert_parameters(encoder, encoder.saved_dtypes)  # round as in the saved files, so that `after` describes them
    convert_parameters(encoder, dict.fromkeys(encoder.saved_dtypes, torch.float32))
    dev = {made["metric"]: made["candidates"][made["saved"]]["dev"]} if run.folds else None
    after, best_step = run.evaluate(run.tasks, dev), trainer.state.best_global_step
    if (worse := report.lower(after, before)) and not certified:
        result["failed"] = 1
        outcome = "the start is saved (the encoder before training)" if start else "the last model is saved"
        print(f"warning: on the dev set, {worse} {outcome}")
        if start:
            certificate.mix(encoder, start, start, 0.0)
            after, best_step = run.evaluate(run.tasks), 0
    return {**result, "before": before, "after": after, "best_step": best_step}


def train_all(run: Run, start: certificate.Weights) -> certificate.Tried:
    """Train the encoder once or, with folds, once per fold, each time from the initial weights. Return the checkpoints
    that the certificate compares, as {name: [one path or, with folds, one path per fold]}."""
    place = run.output.path / CHECKPOINTS
    if not run.folds:
        fit_once(run, place)
        checkpoints = on_rank_zero(lambda: complete_checkpoints(place))
        return {f"step {path.name.rpartition('-')[2]}": [path] for path in checkpoints}
    last = []
    for number, datasets in enumerate(run.folds, 1):
        print(f"fold {number} of {len(run.folds)}")
        folder = place / f"fold-{number}"
        if number > 1:  # `prepare` built the first trainer
            certificate.mix(run.encoder, start, start, 0.0)
            arguments = {**run.arguments, "output_dir": str(folder)}
            run.trainer = build_trainer(run.config, arguments, run.encoder, datasets, None)
        fit_once(run, folder, number)
        last.append(on_rank_zero(functools.partial(complete_checkpoints, folder))[-1])
    return {f"{len(run.folds)} folds": last}


def fit_once(run: Run, checkpoints: Path, fold: int = 0) -> None:
    """Train with the current trainer. Resume from the newest checkpoint, if there is one."""
    trainer, folder = run.trainer, run.output.path
    if run.folds or run.config.training.min_steps:
        trainer.args.max_steps = planned_steps(run)
    if run.config.training.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(run.config.training.patience))
    trainer.add_callback(LogFile(folder / LOG, fold))
    interruption = Interruption(trainer.args)
    trainer.add_callback(interruption)
    write_events_to(trainer, folder / EVENTS)
    checkpoint = on_rank_zero(lambda: newest_checkpoint(checkpoints, trainer.args.save_only_model))
    if checkpoint is not None:
        print(f"resuming from {checkpoint}")
    with interruption:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    run.encoder = trainer.model  # with FSDP, a new object
    trainer.accelerator.unwrap_model(run.encoder, keep_fp32_wrapper=False)  # evaluate as before, without autocast
    run.costs.append(trainer.meter.costs())


def keep_rejected(run: Run, made: Mapping[str, Any]) -> None:
    """Save the best rejected candidate in OUTPUT/rejected, and print how many more dev examples could make its gain
    significant."""
    place, encoder = run.output.path / REJECTED, run.encoder
    remove(place)
    drop_head(encoder)
    convert_parameters(encoder, encoder.saved_dtypes)
    encoder.save_pretrained(str(place), create_model_card=False)
    set_modes(place)
    convert_parameters(encoder, dict.fromkeys(encoder.saved_dtypes, torch.float32))
    count = made["missing_examples"]
    more = f"; about {count} more dev examples could make a gain of this size significant" if count else ""
    print(f"the best rejected candidate, {made['rejected']}, is saved in {run.output.user_path}/{REJECTED}{more}")


def save(run: Run, metrics: dict[str, Any]) -> dict[str, Any]:
    """Save the encoder, its model card, plot and metrics. Return the metrics."""
    folder, encoder = run.output.path, run.encoder
    picture = PICTURE if report.plot_run(run.trainer.state.log_history, metrics, folder / PICTURE) else None
    convert_parameters(encoder, encoder.saved_dtypes)
    section = report.card_section(run.config, metrics, picture)
    save_with_card(encoder, run.output, section, run.config.model.name or "")
    if "certificate" in metrics:
        write_json(folder / certificate.CERTIFICATE, metrics["certificate"])
    write_json(folder / METRICS, metrics)
    print("\n".join(filter(None, [report.summary(metrics), f"saved to {run.output.user_path}"])))
    return metrics


def estimate(config: TrainConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train for STEPS steps, and estimate the duration and peak memory of the whole run, excluding evaluations.

    Return {"rows": {source: rows}, "steps": number of steps of the whole run, "seconds": estimated duration of the run,
    "peak_memory_mb": peak during these steps, as in metrics.json}. Batches with longer texts may need more memory.
    """
    folder = Path(on_rank_zero(tempfile.mkdtemp))
    trial = {**arguments, "output_dir": str(folder), "max_steps": STEPS, "eval_strategy": "no", "save_strategy": "no",
             "load_best_model_at_end": False, "report_to": "none", "logging_strategy": "no"}  # fmt: skip
    try:
        run = prepare(config, trial, {}, folder)
        run.trainer.train()
    finally:
        remove(folder)
    steps, meter = planned_steps(run) * max(1, len(run.folds)), run.trainer.meter
    seconds = steps * (meter.seconds - meter.first_seconds) / (STEPS - 1)
    size, unit = (1, "seconds") if seconds < 120 else (60, "minutes") if seconds < 7200 else (3600, "hours")
    print(f"{steps} steps take about {seconds / size:.1f} {unit}; peak memory {meter.peak / 1000:.2f} GB")
    rows = {name: len(dataset) for name, dataset in run.datasets.items()}
    return {"rows": rows, "steps": steps, "seconds": seconds, "peak_memory_mb": meter.peak}


def build_trainer(
    config: TrainConfig, arguments: dict[str, Any], encoder: Any, datasets: Any, evaluator: Any
) -> Trainer:
    """Create the trainer for a recipe. `arguments` are keywords of SentenceTransformerTrainingArguments."""
    training = config.training
    if config.data.redraw:
        arguments = {**arguments, "batch_sampler": functools.partial(redraw, rows=config.data.max_rows or 0)}
    args = SentenceTransformerTrainingArguments(**arguments)
    if training.gradient_checkpointing:
        # enable it here: since 5.17, transformers' trainer uses keywords that sentence-transformers 6.0 rejects
        encoder.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    loss = build_loss(config, encoder, datasets)
    keywords: Any = {name: getattr(training, name) for name in ("by_length", "packed", "keep", "pretokenize")}
    return Trainer(encoder, args, datasets, loss=loss, evaluator=evaluator, **keywords)


def planned_steps(run: Run) -> int:
    """Return the number of steps of the current training run: max_steps or, if max_steps is not set, the steps of all
    epochs, but at least min_steps. With folds, all folds together take twice as many steps as a run without folds."""
    trainer, training = run.trainer, run.config.training
    wanted, trainer.pretokenize = trainer.pretokenize, False  # only `train` needs pretokenized texts
    epoch_steps = math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)
    trainer.pretokenize = wanted
    steps = training.max_steps or max(training.min_steps, math.ceil(epoch_steps * training.num_train_epochs))
    return math.ceil(2 * steps / len(run.folds)) if run.folds else steps


def build_loss(config: TrainConfig, encoder: Any, datasets: Any) -> Any:
    loss, keywords = config.loss.chosen, config.loss.init_args
    if not loss.asks_teacher:
        return loss(encoder, **keywords)
    if config.teacher.cache is not None:
        embed: Callable[..., Any] = remembered(config.teacher, Texts(datasets), "teacher")
    else:
        embed = embedder(config.teacher, "teacher")
        embed(["."])  # load the teacher now, so that the first step's time does not include loading
    return loss(encoder, embed, **keywords)
