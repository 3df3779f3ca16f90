"""Scores before, during and after training, on the dev set and on tasks."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from raoe_train.evaluation.tasks import Task, encode_tasks, main_score, read_tasks
from raoe_train.settings import SCRATCH, Data, Evaluation, Model, Polarity

# {kind of task: {metric: name in logs}}; the first metric selects the best model
METRICS = {
    "sts": {"spearman": "spearman_cosine", "pearson": "pearson_cosine"},
    "retrieval": {name: f"cosine_{name}" for name in ("ndcg@10", "recall@10", "mrr@10", "accuracy@1")},
}
SELECTING = ("_spearman_cosine", "_cosine_ndcg@10")
NOT_SHOWN = re.compile("^eval_|_spearman_cosine|_cosine")  # parts of metric names that log lines and plots leave out


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


class DevEvaluator(SentenceEvaluator):
    """Evaluates tasks of one kind for the trainer. Returns {NAME_METRIC: mean over tasks} for METRICS, with values up
    to 1, or NaN. NAME_spearman_cosine or NAME_cosine_ndcg@10 selects the best model. With several tasks,
    NAME_TASK_METRIC is the value of one task. NAME_WIDTH_METRIC is for embeddings truncated to a width in `widths`."""

    def __init__(self, tasks: Mapping[str, Task], batch_size: int, name: str, widths: Sequence[int] = ()) -> None:
        super().__init__()
        self.tasks, self.batch_size = tasks, batch_size
        self.widths = {name: None, **{f"{name}_{width}": width for width in widths}}
        self.metrics = METRICS[next(iter(tasks.values())).kind]
        self.primary_metric = f"{name}_{next(iter(self.metrics.values()))}"

    def __call__(self, model: Any, output_path: Any = None, epoch: int = -1, steps: int = -1) -> dict[str, float]:
        results: list[dict[str, dict[str, Any]]] = []
        tasks = [*self.tasks.values()]
        for task, rows in zip(tasks, encode_tasks(model, tasks, self.batch_size), strict=True):
            results.append({name: task.score(rows[:, :width])[0] for name, width in self.widths.items()})
        metrics: dict[str, float] = {}
        for name in self.widths:
            for metric, key in self.metrics.items():
                values = [math.nan if each[name][metric] is None else each[name][metric] / 100 for each in results]
                metrics[f"{name}_{key}"] = sum(values) / len(values)
                if len(values) > 1:
                    metrics |= {f"{name}_{each}_{key}": value for each, value in zip(self.tasks, values, strict=True)}
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics


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
