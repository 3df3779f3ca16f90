"""What a sweep over margins shows: the best of each loss, scores along a grid, one score against the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raoe_train.studies import plots
from raoe_train.studies.markdown import table_head, table_row
from raoe_train.studies.sweep_scores import LETTERS, PREFIX, by_variant, curves, mean, numeric_keys, score


def best_of_each(tasks: list[str], results: list[dict[str, Any]]) -> list[str]:
    """Lines with the best variant of each family (a loss, of its margins) on tasks polarity:NAME, by the mean of P and
    S: the margins paper's Figure 3. None where there are no such tasks."""
    if not tasks or not results:
        return []
    lines = ["", "## Best of each", "", "By the mean of P and S.", ""]
    lines += table_head(["task", "variant", "P", "S", "mean"])
    for task in tasks:
        for variant, rows in best_variants(results, task).items():
            lines.append(table_row([task.removeprefix(PREFIX), variant, *map(mean, _both(rows, task))]))
    return lines


def polarity_plots(output: Path, tasks: list[str], results: list[dict[str, Any]], start: dict[str, Any]) -> list[Path]:
    """Plots of tasks polarity:NAME in `output`; none where there are no such tasks.

    - P and S along each numeric key of a grid.
    - P against S, with the front: variants that none is better than in both.
    - P and S along the number of retrieved sentences, of the encoders before training: the paper's Figure 2.
    """
    if not tasks or not results:
        return []
    made: list[Path] = []
    names = {task: [f"{letter} {task.removeprefix(PREFIX)}" for letter in LETTERS] for task in tasks}
    for key in numeric_keys(results):
        panels = {}
        for task in tasks:
            polarity, similarity = (curves(results, key, [name]) for name in names[task])
            panels[task] = {
                family: [(x, points[x], similarity[family][x]) for x in sorted(points)]
                for family, points in polarity.items()
                if len(points) > 1
            }
        if any(panels.values()):
            made.append(output / f"polarity-{key.rpartition('.')[2]}.png")
            plots.plot_polarity(_titled(panels), key, made[-1])
    points = {
        task: {
            variant: (p, s)
            for variant, rows in by_variant(results).items()
            for p, s in [_means(rows, task)]
            if p is not None and s is not None
        }
        for task in tasks
    }
    before = {
        task: {
            f"before: {Path(model).name}": (found["polarity"], found["similarity"])
            for model, scores in start.items()
            if (found := scores["tasks"].get(task))
        }
        for task in tasks
    }
    made.append(output / "polarity-against-similarity.png")
    plots.plot_tradeoff(_titled(points), _titled(before), made[-1])
    along = {
        task: {
            Path(model).name: [(int(k), at["polarity"], at["similarity"]) for k, at in found["curve"].items()]
            for model, scores in start.items()
            if "curve" in (found := scores["tasks"].get(task, {}))
        }
        for task in tasks
    }
    if any(along.values()):
        made.append(output / "polarity-k.png")
        plots.plot_polarity(_titled(along), "retrieved sentences k", made[-1])
    return made


def best_variants(results: list[dict[str, Any]], task: str) -> dict[str, list[dict[str, Any]]]:
    """{variant: its runs} for the variant of each family with the highest mean of P and S on a task."""
    families: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for variant, rows in by_variant(results).items():
        if None not in _means(rows, task):
            families.setdefault(rows[0]["family"], {})[variant] = rows
    best = {}
    for variants in families.values():
        variant = max(variants, key=lambda name: sum(value or 0.0 for value in _means(variants[name], task)))
        best[variant] = variants[variant]
    return best


def _both(rows: list[dict[str, Any]], task: str) -> list[list[float | None]]:
    """P, S and their mean of each run."""
    polarity, similarity = ([score(row, f"{letter} {task.removeprefix(PREFIX)}") for row in rows] for letter in LETTERS)
    means = [None if p is None or s is None else (p + s) / 2 for p, s in zip(polarity, similarity, strict=True)]
    return [polarity, similarity, means]


def _means(rows: list[dict[str, Any]], task: str) -> tuple[float | None, float | None]:
    polarity, similarity, _ = _both(rows, task)
    return _mean_of(polarity), _mean_of(similarity)


def _mean_of(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found and len(found) == len(values) else None


def _titled(panels: dict[str, Any]) -> dict[str, Any]:
    return {task.removeprefix(PREFIX): content for task, content in panels.items() if content}
