"""Evaluation before and after training on the dev set and on tasks, formatted as a table and a plot."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.evaluation.dev import NOT_SHOWN, SELECTING
from raoe_train.evaluation.tasks import Task, main_score, read_tasks
from raoe_train.settings import SCRATCH, Data, Evaluation, Model, Polarity
from raoe_train.training import report

# keys of log entries; all other keys of an entry with a loss are parts of the loss
NOT_PARTS = {"loss", "step", "epoch", "learning_rate", "grad_norm", "num_input_tokens_seen", "entropy"}
BAR_COLOURS = {"before": report.COLOURS[-1], "after": report.COLOURS[1]}


def tasks_of(evaluation: Evaluation, data: Data, model: Model, polarity: Polarity) -> dict[str, Task]:
    """Read the tasks of the recipe, if any. The default reference of polarity tasks is the encoder before training."""
    if not evaluation.tasks:
        return {}
    if polarity.reference is None and model.name != SCRATCH:
        start: Any = model  # all settings: pooling, prompt, length, revision …
        polarity = replace(polarity, reference=start)
    return read_tasks(
        evaluation.tasks, data.dir, prompt=model.prompt, polarity=polarity, classifier=evaluation.classifier
    )


def dev_metrics(evaluator: Any, model: Any) -> dict[str, float | None]:
    """Return metrics x 100 on the dev set (means over several dev sets), with None for an undefined correlation."""
    results, metrics = ({}, {}) if evaluator is None else (evaluator(model), evaluator.metrics)
    values = {name: 100 * results[f"dev_{key}"] for name, key in metrics.items()}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _dev_metric(after: Mapping[str, Any]) -> str:
    """Return the name of the metric that selects the best checkpoint on the dev set."""
    return "spearman" if "spearman" in after else "ndcg@10"


def lower(after: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return a text such as "spearman falls from 73.63 to 30.40:" if training lowered the dev score, else ""."""
    name = _dev_metric(after)
    old, new = before.get(name), after.get(name)
    return "" if old is None or new is None or new >= old else f"{name} falls from {old:.2f} to {new:.2f}:"


def scores(metrics: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    """Return {name: (score before training, after)} x 100, for the dev metric, each task, and S of polarity tasks."""
    before, after = metrics["before"], metrics["after"]
    main = _dev_metric(after)
    table = {"dev": (before.get(main), after[main])} if main in after else {}
    for task, later in after.get("tasks", {}).items():
        earlier = before.get("tasks", {}).get(task, {})
        table[task] = (main_score(earlier), main_score(later))
        if "similarity" in later:
            table[f"{task} (S)"] = (earlier.get("similarity"), later.get("similarity"))
    return table


def score_rows(metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Format `scores` as rows of text (name, before, after, change)."""
    rows = []
    for name, (before, after) in scores(metrics).items():
        change = "-" if before is None or after is None else f"{after - before:+.2f}"
        rows.append((name, *("-" if value is None else f"{value:.2f}" for value in (before, after)), change))
    return rows


def summary(metrics: dict[str, Any]) -> str:
    """Format the scores before and after training as a table, one line for each score."""
    rows = score_rows(metrics)
    width = max([24, *(len(name) for name, *_ in rows)])
    head = [("main metric x 100", "before", "after", "change")] if rows else []
    return "\n".join(f"{name:<{width}}{''.join(f'{value:>8}' for value in values)}" for name, *values in [*head, *rows])


def plot_run(log_history: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any], path: Path) -> list[Path]:
    """Plot the scores before and after training as bars, if there are scores. Below, plot the logged losses over the
    steps, and the dev metric x 100 on a second axis. Return [path], or [] if no loss was logged. The suffix of `path`
    sets the format."""
    from matplotlib.figure import Figure  # does not change the user's pyplot backend

    if not any("loss" in entry for entry in log_history):
        return []
    bars, curves = scores(metrics), list[Any]()
    heights = [1 + 0.5 * len(bars), 4.0]
    plot = Figure(figsize=(7.0, sum(heights) if bars else heights[1]), layout="constrained")
    *top, left = plot.subplots(2, height_ratios=heights) if bars else [plot.subplots()]
    for axes in top:
        place = np.arange(len(bars))
        for values, label, offset in zip(zip(*bars.values(), strict=True), BAR_COLOURS, (-0.2, 0.2), strict=True):
            widths = [math.nan if value is None else value for value in values]
            drawn = axes.barh(place + offset, widths, 0.4, color=BAR_COLOURS[label], label=label)
            axes.bar_label(drawn, ["" if value is None else f"{value:.2f}" for value in values], padding=2)
        axes.set_yticks(place, [*bars], parse_math=False)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title("scores before and after training (main metric x 100)")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    parts = {key for entry in log_history if "loss" in entry for key in entry} - NOT_PARTS
    dev = sorted({key for entry in log_history for key in entry if key.endswith(SELECTING)})
    colours = itertools.cycle(report.COLOURS)
    left.set(xlabel="step", ylabel="training loss")
    left.locator_params("x", integer=True)
    for key in ("loss", *sorted(parts)):
        curves += left.plot(*_series(log_history, key), color=next(colours), label=key)
    if dev:
        right = left.twinx()
        right.set_ylabel("dev metric x 100")
        for key in dev:
            steps, values = _series(log_history, key)
            label = f"{NOT_SHOWN.sub('', key)} (right)"
            curves += right.plot(steps, 100 * values, "o-", markersize=3, color=next(colours), label=label)
    plot.legend(handles=curves, loc="outside lower center", ncols=5, frameon=False)
    report.save(plot, path)
    return [path]


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return [2, n]: the steps whose log entry has a key, and the values of the key."""
    points = [(entry["step"], float(entry[key])) for entry in log_history if key in entry]
    return np.array(points, dtype=float).reshape(-1, 2).T
