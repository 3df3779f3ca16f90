"""Plots of sweeps, reports and analyses. Each writes `path`, whose suffix names the format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import figures

Panels = Mapping[str, Mapping[str, Any]]  # {title of a panel: {name: its points, or rows}}


def plot_lines(
    panels: Panels, along: str, what: str, path: str | Path, levels: Mapping[str, float] = {}, log: bool = True
) -> None:
    """Lines of points (x, y), or (x, y, another y, which is dotted), in order of x, and level ones; where `log`, wide
    ranges of x have a logarithmic axis."""
    made, axes = figures.figure(1, len(panels), size=(6.5 * len(panels), 4.4))
    for axis, (title, lines) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for (name, points), colour in zip(lines.items(), figures.colours(len(lines)), strict=True):
            x, solid, *dotted = zip(*points, strict=True)
            axis.plot(x, solid, "o-", markersize=3, color=colour, label=name)
            for values in dotted:
                axis.plot(x, values, "o:", markersize=3, color=colour)
        for name, level in levels.items():
            axis.axhline(level, linestyle="--", color="grey", label=name)
        places = [x for points in lines.values() for x, *_ in points]
        if log and min(places) > 0 and max(places) / min(places) >= 8:
            axis.set_xscale("log")
        axis.set(title=title, xlabel=along, ylabel=what)
        axis.legend(frameon=False, fontsize="small")
    figures.save(made, path)


def plot_drift(found: Panels, path: str | Path) -> None:
    """Of each file, {label: what drift found}, a heatmap of mean similarities, all on one scale of colours without
    the diagonal, which is 1, and the curves of all by distance (the ranking-sentences paper's Figure 1)."""
    made, axes = figures.figure(1, len(found) + 1, size=(3.6 * (len(found) + 1), 3.4))
    maps = [np.where(np.eye(len(drifted["similarity"])), np.nan, drifted["similarity"]) for drifted in found.values()]
    lowest, highest = min(map(np.nanmin, maps)), max(map(np.nanmax, maps))
    for axis, label, values in zip(axes, found, maps, strict=False):
        image = axis.imshow(values, vmin=lowest, vmax=highest)
        axis.set(title=label, xlabel="place in the chain")
    made.colorbar(image, ax=axes[-2], label="mean cosine")
    for (label, drifted), colour in zip(found.items(), figures.colours(len(found)), strict=True):
        apart = drifted["by_distance"][1:]
        axes[-1].plot(range(1, len(apart) + 1), apart, "o-", markersize=3, color=colour, label=label)
    axes[-1].locator_params(axis="x", integer=True)
    axes[-1].set(xlabel="distance in the chain", ylabel="mean cosine")
    axes[-1].legend(frameon=False)
    figures.save(made, path)


def plot_tradeoff(panels: Panels, before: Panels, path: str | Path) -> None:
    """Polarity scores against semantic scores: of each task a panel, {name: (P, S)}, with the front of what nothing
    else beats in both; encoders before training are marked, and no part of the front."""
    made, axes = figures.figure(1, len(panels), size=(6.0 * len(panels), 6.0))
    for axis, (task, points) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for point in points.values():
            axis.plot(*point, "o", color=figures.COLOURS[-1], markersize=4)
        names: dict[tuple[float, float], str] = {}  # of equal points, as of one run under two names, the first
        for (name, point), kept in zip(points.items(), pareto(list(points.values())), strict=True):
            if kept:
                names.setdefault(point, name)
        best = sorted(names)
        axis.plot([p for p, _ in best], [s for _, s in best], color=figures.COLOURS[0], linewidth=1)
        for number, point in enumerate(best, 1):
            axis.plot(*point, "o", color=figures.COLOURS[0], markersize=5, label=f"{number}  {names[point]}")
            axis.annotate(str(number), point, fontsize="small", xytext=(4, 4), textcoords="offset points")
        for (name, point), colour in zip(before[task].items(), itertools.cycle(figures.COLOURS[2:]), strict=False):
            axis.plot(*point, "*", color=colour, markersize=10, label=name)
        axis.set(title=task, xlabel="polarity score P x 100", ylabel="semantic score S x 100")
        axis.margins(0.1)
        axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figures.save(made, path)


def plot_rows(panels: Panels, what: str, path: str | Path) -> None:
    """{title: {model: {task: (lowest, value, highest), or None}}}: a panel each title, a row each task, a mark and its
    interval each model."""
    tasks = {title: list(dict.fromkeys(task for row in of.values() for task in row)) for title, of in panels.items()}
    models = list(dict.fromkeys(model for of in panels.values() for model in of))
    height = sum(1.2 + (0.2 + 0.1 * len(models)) * len(of) for of in tasks.values())
    made, axes = figures.figure(len(panels), 1, (7.0, height))
    looks = dict(
        zip(models, zip(figures.colours(len(models)), itertools.cycle(figures.MARKS), strict=False), strict=True)
    )
    for axis, (title, of) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for model, row in of.items():
            colour, mark = looks[model]
            apart = 0.7 * ((models.index(model) + 0.5) / len(models) - 0.5)
            found = [(tasks[title].index(task) + apart, *values) for task, values in row.items() if values is not None]
            places, low, value, high = np.array(found).reshape(-1, 4).T
            axis.plot([low, high], [places, places], color=colour)
            axis.plot(value, places, mark, color=colour, label=model)
        axis.set(title=title, xlabel=what, yticks=range(len(tasks[title])), ylim=(len(tasks[title]) - 0.5, -0.5))
        axis.set_yticklabels(tasks[title])
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    figures.save(made, path)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each point whether none other is at least as high in both and higher in one."""
    return [not any(p >= a and s >= b and (p, s) != (a, b) for p, s in points) for a, b in points]
