"""The plots of a sweep: metrics along the keys of its grids, and polarity against similarity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raoe_train.studies import plots
from raoe_train.studies.sweep_metrics import (
    PREFIX,
    by_variant,
    curves,
    numeric_keys,
    polarity_columns,
    polarity_means,
)

Results = list[dict[str, Any]]  # of finished runs, see sweep_metrics


def along_grids(output: Path, names: Sequence[str], results: Results, start: dict[str, Any]) -> list[Path]:
    """For every numeric key of a grid a plot in `output`: the metric, that of the first of `names` that a run has,
    against the key's value, a line for each family of variants."""
    before = {
        f"before: {Path(model).name}": found["average"]
        for model, found in start.items()
        if found.get("average") is not None
    }
    made = []
    for key in numeric_keys(results):
        lines = {family: [*points.items()] for family, points in curves(results, key, names).items()}
        if lines:
            made.append(output / f"{key.rpartition('.')[2]}.png")
            plots.plot_curves(lines, before, key, made[-1])
    return made


def of_polarity(output: Path, tasks: Sequence[str], results: Results, start: dict[str, Any]) -> list[Path]:
    """Plots of tasks polarity:NAME in `output`; none where there are no such tasks.

    - P and S along each numeric key of a grid.
    - P against S, with the front: variants that none is better than in both.
    - P and S along the number of retrieved sentences, of the encoders before training: the paper's Figure 2.
    """
    if not tasks or not results:
        return []
    made: list[Path] = []
    for key in numeric_keys(results):
        panels = {}
        for task in tasks:
            of_p, of_s = (curves(results, key, [column]) for column in polarity_columns(task))
            panels[task] = {
                line: [(x, value, of_s[line][x]) for x, value in points.items()] for line, points in of_p.items()
            }
        if any(panels.values()):
            made.append(output / f"polarity-{key.rpartition('.')[2]}.png")
            plots.plot_polarity(_titled(panels), key, made[-1])
    points, before, along = {}, {}, {}
    for task in tasks:
        means = {variant: polarity_means(runs, task) for variant, runs in by_variant(results).items()}
        points[task] = {variant: (p, s) for variant, (p, s) in means.items() if p is not None and s is not None}
        found = {Path(model).name: of["tasks"][task] for model, of in start.items() if task in of["tasks"]}
        before[task] = {f"before: {name}": (of["polarity"], of["similarity"]) for name, of in found.items()}
        along[task] = {
            name: [(int(k), at["polarity"], at["similarity"]) for k, at in of["curve"].items()]
            for name, of in found.items()
            if "curve" in of
        }
    made.append(output / "polarity-against-similarity.png")
    plots.plot_tradeoff(_titled(points), _titled(before), made[-1])
    if any(along.values()):
        made.append(output / "polarity-k.png")
        plots.plot_polarity(_titled(along), "retrieved sentences k", made[-1])
    return made


def _titled(panels: dict[str, Any]) -> dict[str, Any]:
    return {task.removeprefix(PREFIX): content for task, content in panels.items() if content}
