"""The metrics of a sweep's runs: by column of its table, by variant and along its grids.

A result is what sweep returns of a run: run, variant, family, seed, point and what its metrics.json holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raoe_train.evaluation.tasks import main_score, mean_of_all

PREFIX = "polarity:"  # of tasks that have two main metrics
LETTERS = {"P": "polarity", "S": "similarity"}

# columns of a sweep that measures: what a run cost, see raoe_train.training.cost_meter
COSTS: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "peak MB": lambda row: row.get("peak_memory_mb"),
    "s / 1,000 steps": lambda row: 1000 * row["train_seconds"] / row["train_steps"] if row.get("train_steps") else None,
}


def columns(tasks: Sequence[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table has a column for: dev, main metrics of tasks and their average, P and S of polarity tasks."""
    single = [task for task in tasks if not task.startswith(PREFIX)]
    others = [task for task in tasks if task.startswith(PREFIX)]
    dev = single or not others or any(metric(row["after"], "dev") is not None for row in results)
    names = ["dev"] if dev else []
    names += [*single, "average"] if single else []
    return names + [column for task in others for column in polarity_columns(task)]


def polarity_columns(task: str) -> list[str]:
    """The columns of a task polarity:NAME: "P NAME" and "S NAME"."""
    return [f"{letter} {task.removeprefix(PREFIX)}" for letter in LETTERS]


def metric(result: Mapping[str, Any], column: str) -> float | None:
    """What an encoder's result, before or after training, has in a column, x100."""
    if column in ("dev", "average"):
        return result.get("spearman" if column == "dev" else "average")
    tasks = result.get("tasks", {})
    letter, _, name = column.partition(" ")
    if letter in LETTERS and name:
        return tasks.get(PREFIX + name, {}).get(LETTERS[letter])
    return main_score(tasks.get(column, {}))


def by_variant(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Results of each variant, in the order in which variants come."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        rows.setdefault(result["variant"], []).append(result)
    return rows


def mean(values: Sequence[float | None]) -> str:
    """Mean and standard deviation as text; a dash where one is missing."""
    found = [value for value in values if value is not None]
    if not found or len(found) < len(values):
        return "-"
    text = f"{statistics.fmean(found):.2f}"
    return f"{text} ± {statistics.stdev(found):.2f}" if len(found) > 1 else text


def polarity_means(rows: Sequence[Mapping[str, Any]], task: str) -> tuple[float | None, float | None]:
    """The means of P and of S over the runs of a variant."""
    of_p, of_s = (mean_of_all([metric(row["after"], column) for row in rows]) for column in polarity_columns(task))
    return of_p, of_s


def best_variants(results: Sequence[dict[str, Any]], task: str) -> dict[str, list[dict[str, Any]]]:
    """{variant: its runs} for the variant of each family with the highest mean of P and S on a task."""
    families: dict[str, dict[str, float]] = {}
    variants = by_variant(results)
    for variant, rows in variants.items():
        of_p, of_s = polarity_means(rows, task)
        if of_p is not None and of_s is not None:
            families.setdefault(rows[0]["family"], {})[variant] = of_p + of_s
    best = [max(sums, key=lambda variant: sums[variant]) for sums in families.values()]
    return {variant: variants[variant] for variant in best}


def curves(results: Sequence[Mapping[str, Any]], key: str, columns: Sequence[str]) -> dict[str, dict[float, float]]:
    """{family of variants: {value of a grid's key: mean metric}} in order, the metric that of the first of `columns`
    that a run has. A line of one point is left out, and so is a value that is a word, as tau's "auto"."""
    lines: dict[str, dict[float, list[float]]] = {}
    for row in results:
        found = next((value for name in columns if (value := metric(row["after"], name)) is not None), None)
        if is_number(row["point"].get(key)) and found is not None:
            others = "".join(f", {k.rpartition('.')[2]} {v}" for k, v in row["point"].items() if k != key)
            lines.setdefault(row["family"] + others, {}).setdefault(row["point"][key], []).append(found)
    return {
        line: {x: statistics.fmean(values) for x, values in sorted(points.items())}
        for line, points in lines.items()
        if len(points) > 1
    }


def numeric_keys(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of grids that have numbers."""
    return sorted({key for row in results for key, value in row["point"].items() if is_number(value)})


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
