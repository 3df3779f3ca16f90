"""What a training run is measured by before and after, development pairs and tasks, and what came of it in words and
pictures."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import report
from raoe_train.config import PositiveInt
from raoe_train.data.settings import Data
from raoe_train.encoders.settings import SCRATCH, FrozenEncoder, Model
from raoe_train.evaluation.classifiers import Classifier
from raoe_train.evaluation.tasks import Batcher, Polarity, Task, main_score, read_tasks

SPEARMAN = "_spearman_cosine"
LOST = -0.2  # points: a lower average elsewhere wants advice
# keys of a log entry that are not parts of the loss
NOT_PARTS = {"loss", "step", "epoch", "learning_rate", "grad_norm", "num_input_tokens_seen", "entropy"}


@dataclass
class Evaluation:
    """What to evaluate before and after training.

    Args:
        tasks: tasks of any kind, as of the job evaluate, looked up in data.dir
        before: evaluate them before training, too
        batch_size: sentences at a time
        classifier: classifier of transfer tasks
        batcher: change sentences of sts and transfer as the code of bellm or angle does
    """

    tasks: list[str] = field(default_factory=list)
    before: bool = True
    batch_size: PositiveInt = 64
    classifier: Classifier | None = None
    batcher: Batcher = None


def tasks_of(evaluation: Evaluation, data: Data, model: Model, polarity: Polarity) -> dict[str, Task]:
    """The recipe's tasks, read; {} where it names none. Polarity's reference is the encoder that training starts from
    where the recipe names none."""
    if not evaluation.tasks:
        return {}
    if polarity.reference is None and not model.random_weights and model.name != SCRATCH:
        polarity = replace(polarity, reference=FrozenEncoder(name=model.name))
    return read_tasks(
        evaluation.tasks,
        data.dir,
        prompt=model.prompt,
        polarity=polarity,
        classifier=evaluation.classifier,
        batcher=evaluation.batcher,
    )


def dev_evaluator(pairs: Mapping[str, Any], batch_size: int) -> Any:
    """The evaluator on development pairs; None where there are none."""
    if not pairs:
        return None
    from raoe_train.evaluation.sts import StsEvaluator

    return StsEvaluator(pairs, batch_size, "dev")


def dev_metrics(evaluator: Any, model: Any) -> dict[str, float | None]:
    """Correlations x 100, as of a task, the mean of several sets; None where they are undefined."""
    found = evaluator(model) if evaluator is not None else {}
    values = {name: 100 * found[f"dev_{name}_cosine"] for name in ("spearman", "pearson") if found}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def scores(metrics: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    """{name: (before, after)} training, x 100: of dev and each task's main metric, and of S of a polarity task."""
    before, after = metrics["before"], metrics["after"]
    found = {"dev": (before.get("spearman"), after.get("spearman"))} if "spearman" in after else {}
    for task, its in after.get("tasks", {}).items():
        earlier = before.get("tasks", {}).get(task, {})
        found[task] = (main_score(earlier), main_score(its))
        if "similarity" in its:
            found[f"{task} (S)"] = (earlier.get("similarity"), its.get("similarity"))
    return found


def score_rows(metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """(name, before, after) of `scores`, as they are shown."""
    found = scores(metrics).items()
    return [(name, *("-" if value is None else f"{value:.2f}" for value in both)) for name, both in found]


def summary(metrics: dict[str, Any]) -> str:
    """The scores before and after, a line each."""
    rows = score_rows(metrics)
    width = max([24, *(len(name) for name, *_ in rows)])
    head = [("main metric x 100", "before", "after")] if rows else []
    return "\n".join(f"{name:<{width}}{first:>8}{second:>8}" for name, first, second in [*head, *rows])


def changes(metrics: Mapping[str, Any]) -> dict[str, float]:
    """{dev or a task: its main metric x 100 after training less that before}, as far as both are there."""
    found = scores(metrics).items()
    return {name: after - before for name, (before, after) in found if before is not None and after is not None}


def in_words(metrics: Mapping[str, Any]) -> list[str]:
    """Sentences on the scores of metrics.json: dev, the sets elsewhere, and advice where these lost."""
    elsewhere, sentences = changes(metrics), []
    if (gain := elsewhere.pop("dev", None)) is not None:
        before, after = scores(metrics)["dev"]
        sentences.append(f"On its development pairs the encoder went from {before:.2f} to {after:.2f} ({gain:+.2f}).")
    if elsewhere:
        mean = sum(elsewhere.values()) / len(elsewhere)
        ends = (choose(elsewhere, key=elsewhere.__getitem__) for choose in (min, max))
        spread = " to ".join(f"{elsewhere[name]:+.2f} ({name})" for name in ends)
        spread = f" on average, from {spread}" if len(elsewhere) > 1 else ""
        name = "other tasks" if spread else next(iter(elsewhere))
        sentences.append(f"On {name} it changed by {mean:+.2f}{spread}.")
        if mean < LOST:
            more = "a larger" if metrics.get("keep") else "some"
            sentences.append(f"To lose less there: {more} training.keep.")
    return sentences


def plot_changes(metrics: Mapping[str, Any], path: Path) -> list[Path]:
    """A bar for each of `changes`; nothing for fewer than two."""
    found = changes(metrics)
    if len(found) < 2:
        return []
    plot, axes = report.figure(size=(7.0, 1.0 + 0.3 * len(found)))
    colours = [report.COLOURS[1] if change >= 0 else report.COLOURS[2] for change in found.values()]
    bars = axes.barh([*found], [*found.values()], color=colours)
    axes.bar_label(bars, [f"{change:+.2f}" for change in found.values()], padding=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set(xlabel="main metric x 100, after training less before")
    report.save(plot, path)
    return [path]


def plot_run(log_history: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Losses over steps and, on a second axis, the Spearman correlations of evaluations, x100, of the trainer's log
    entries: [path], or nothing where no loss was logged. The suffix of `path` names the format."""
    if not any("loss" in entry for entry in log_history):
        return []
    plot, left = report.figure()
    parts = {key for entry in log_history if "loss" in entry for key in entry} - NOT_PARTS
    correlations = sorted({key for entry in log_history for key in entry if key.endswith(SPEARMAN)})
    colours = itertools.cycle(report.COLOURS)
    left.set(xlabel="step", ylabel="training loss")
    for key in ("loss", *sorted(parts)):
        left.plot(*_series(log_history, key), color=next(colours), label=key)
    if correlations:
        right = left.twinx()
        right.set_ylabel("Spearman x100")
        for key in correlations:
            steps, values = _series(log_history, key)
            label = f"{key.removeprefix('eval_').removesuffix(SPEARMAN)} (right)"
            right.plot(steps, 100 * values, "o-", markersize=3, color=next(colours), label=label)
    plot.legend(loc="outside upper center", ncols=5, frameon=False)
    report.save(plot, path)
    return [path]


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """The steps that have a key, and its values there, [2, n]."""
    points = [(entry["step"], float(entry[key])) for entry in log_history if key in entry]
    return np.array(points, dtype=float).reshape(-1, 2).T
