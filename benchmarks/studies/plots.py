"""Plots of sweeps and reports. Each function writes `path`, whose suffix is the format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart
COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKS = "osD^vP"
Panels = Mapping[str, Mapping[str, Any]]  # {title of a panel: {name: its points, or rows}}


def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure without pyplot, which needs no display, and the array of its axes."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, np.atleast_1d(figure.subplots(rows, columns))


def plot_lines(
    panels: Panels, along: str, what: str, path: str | Path, levels: Mapping[str, float] | None = None
) -> None:
    """Draw lines of points (x, y) or (x, solid y, dotted y), and level lines; wide ranges of x have a log axis."""
    figure, axes = subplots(1, len(panels), (6.5 * len(panels), 4.4))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for (name, points), colour in zip(lines.items(), itertools.cycle(COLOURS), strict=False):
            x, solid, *dotted = zip(*points, strict=True)
            axis.plot(x, solid, "o-", markersize=3, color=colour, label=name)
            for values in dotted:
                axis.plot(x, values, "o:", markersize=3, color=colour)
        for name, level in (levels or {}).items():
            axis.axhline(level, linestyle="--", color="grey", label=name)
        places = [x for points in lines.values() for x, *_ in points]
        if min(places) > 0 and max(places) / min(places) >= 8:
            axis.set_xscale("log")
        axis.set(title=title, xlabel=along, ylabel=what)
        axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def plot_drift(drifts: Panels, path: str | Path) -> None:
    """Draw a heatmap of mean similarities for each file, {label: result of drift}, and the curves of all files by
    distance (the ranking-sentences paper's Figure 1). The heatmaps share a scale and leave the diagonal of ones out."""
    figure, axes = subplots(1, len(drifts) + 1, (3.6 * (len(drifts) + 1), 3.4))
    maps = [np.where(np.eye(len(drift["similarity"])), np.nan, drift["similarity"]) for drift in drifts.values()]
    lowest, highest = min(map(np.nanmin, maps)), max(map(np.nanmax, maps))
    for axis, label, values in zip(axes, drifts, maps, strict=False):
        image = axis.imshow(values, vmin=lowest, vmax=highest)
        axis.set(title=label, xlabel="place in the chain")
    figure.colorbar(image, ax=axes[-2], label="mean cosine")
    for (label, drift), colour in zip(drifts.items(), itertools.cycle(COLOURS), strict=False):
        curve = drift["by_distance"][1:]
        axes[-1].plot(range(1, len(curve) + 1), curve, "o-", markersize=3, color=colour, label=label)
    axes[-1].locator_params(axis="x", integer=True)
    axes[-1].set(xlabel="distance in the chain", ylabel="mean cosine")
    axes[-1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_tradeoff(panels: Panels, before: Panels, path: str | Path) -> None:
    """Draw polarity scores against semantic scores, {name: (P, S)} for each task, with the Pareto front of trained
    encoders; encoders before training are stars."""
    figure, axes = subplots(1, len(panels), (6.0 * len(panels), 6.0))
    for axis, (task, points) in zip(axes, panels.items(), strict=True):
        for point in points.values():
            axis.plot(*point, "o", color=COLOURS[-1], markersize=4)
        names: dict[tuple[float, float], str] = {}  # one run under two names counts once
        for (name, point), kept in zip(points.items(), pareto(list(points.values())), strict=True):
            if kept:
                names.setdefault(point, name)
        best = sorted(names)
        axis.plot([p for p, _ in best], [s for _, s in best], color=COLOURS[0], linewidth=1)
        for number, point in enumerate(best, 1):
            axis.plot(*point, "o", color=COLOURS[0], markersize=5, label=f"{number}  {names[point]}")
            axis.annotate(str(number), point, fontsize="small", xytext=(4, 4), textcoords="offset points")
        for (name, point), colour in zip(before[task].items(), itertools.cycle(COLOURS[2:]), strict=False):
            axis.plot(*point, "*", color=colour, markersize=10, label=name)
        axis.set(title=task, xlabel="polarity score P x 100", ylabel="semantic score S x 100")
        axis.margins(0.1)
        axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(path, dpi=150)


def plot_rows(panels: Panels, path: str | Path) -> None:
    """Draw {title: {model: {task: (low, value, high) or None}}}: a panel for each title, a row for each task, and a
    mark with its interval for each model."""
    tasks = {title: list(dict.fromkeys(task for row in of.values() for task in row)) for title, of in panels.items()}
    models = list(dict.fromkeys(model for of in panels.values() for model in of))
    height = sum(1.2 + (0.2 + 0.1 * len(models)) * len(of) for of in tasks.values())
    figure, axes = subplots(len(panels), 1, (7.0, height))
    looks = {model: (COLOURS[n % len(COLOURS)], MARKS[n % len(MARKS)]) for n, model in enumerate(models)}
    for axis, (title, of) in zip(axes, panels.items(), strict=True):
        for model, row in of.items():
            colour, mark = looks[model]
            shift = 0.7 * ((models.index(model) + 0.5) / len(models) - 0.5)
            points = [(tasks[title].index(task) + shift, *values) for task, values in row.items() if values is not None]
            places, low, value, high = np.array(points).reshape(-1, 4).T
            axis.plot([low, high], [places, places], color=colour)
            axis.plot(value, places, mark, color=colour, label=model)
        axis.set(title=title, yticks=range(len(tasks[title])), ylim=(len(tasks[title]) - 0.5, -0.5))
        axis.set_yticklabels(tasks[title])
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point, whether no other one is at least as high in both values and higher in one."""
    return [not any(p >= a and s >= b and (p, s) != (a, b) for p, s in points) for a, b in points]
