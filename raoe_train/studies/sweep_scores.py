"""The scores of a sweep's runs, by variant, by column of its table and along its grids."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raoe_train.evaluation.tasks import main_score

PREFIX = "polarity:"  # of tasks that have two scores
LETTERS = {"P": "polarity", "S": "similarity"}


def _seconds_per_1000_steps(row: Mapping[str, Any]) -> float | None:
    return 1000 * row["train_seconds"] / row["train_steps"] if row.get("train_steps") else None


# Columns of a sweep that measures: what a run cost, see raoe_train.training.cost_meter.
COSTS: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "peak MB": lambda row: row.get("peak_memory_mb"),
    "s / 1,000 steps": _seconds_per_1000_steps,
}


def columns(tasks: list[str], results: list[dict[str, Any]]) -> list[str]:
    """What the table has a column for: dev, main metrics of tasks and their average, P and S of polarity tasks."""
    single = [task for task in tasks if not task.startswith(PREFIX)]
    others = [task for task in tasks if task.startswith(PREFIX)]
    dev = single or not others or any(score(row, "dev") is not None for row in results)
    names = ["dev"] if dev else []
    names += [*single, "average"] if single else []
    return names + [f"{letter} {task.removeprefix(PREFIX)}" for task in others for letter in LETTERS]


def by_variant(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Results of each variant, in the order in which variants come."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        rows.setdefault(result["variant"], []).append(result)
    return rows


def score(row: Mapping[str, Any], name: str) -> float | None:
    """What a run has in one column of the table, x 100."""
    found = row["after"]
    if name == "dev":
        return found.get("spearman")
    if name == "average":
        return found.get("average")
    letter, _, task = name.partition(" ")
    if letter in LETTERS and task:
        return found.get("tasks", {}).get(PREFIX + task, {}).get(LETTERS[letter])
    return main_score(found.get("tasks", {}).get(name, {}))


def mean(values: Sequence[float | None]) -> str:
    """Mean and standard deviation as text; a dash where one is missing."""
    found = [value for value in values if value is not None]
    if not found or len(found) < len(values):
        return "-"
    text = f"{statistics.fmean(found):.2f}"
    return f"{text} ± {statistics.stdev(found):.2f}" if len(found) > 1 else text


def curves(results: list[dict[str, Any]], key: str, names: Sequence[str]) -> dict[str, dict[float, float]]:
    """{family of variants: {value of a grid's key: mean score}}, the score that of the first of `names` that a run has.

    A value that is a word, as tau's "auto", is in the table alone.
    """
    values: dict[str, dict[float, list[float]]] = {}
    for row in results:
        found = next((value for name in names if (value := score(row, name)) is not None), None)
        if is_number(row["point"].get(key)) and found is not None:
            others = "".join(f", {k.rpartition('.')[2]} {v}" for k, v in row["point"].items() if k != key)
            values.setdefault(row["family"] + others, {}).setdefault(row["point"][key], []).append(found)
    return {line: {x: statistics.fmean(all_of) for x, all_of in points.items()} for line, points in values.items()}


def numeric_keys(results: list[dict[str, Any]]) -> list[str]:
    """The keys of grids that have numbers."""
    return sorted({key for row in results for key, value in row["point"].items() if is_number(value)})


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
