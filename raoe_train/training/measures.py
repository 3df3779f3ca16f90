"""Scores before and after training, on the dev set and on tasks."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raoe_train.evaluation.tasks import Task, main_score, read_tasks
from raoe_train.settings import SCRATCH, Data, Evaluation, Model, Polarity


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
    if rows:
        rows.insert(0, ("main metric x 100", "before", "after", "change"))
    return "\n".join(f"{name:<{width}}" + "".join(f"{value:>8}" for value in values) for name, *values in rows)
