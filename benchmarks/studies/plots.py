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
POLARITY = ("polarity score P x 100", "semantic score S x 100")  # names of axes
Panels = Mapping[str, Mapping[str, Any]]  # {title of a panel: {name: its points, or rows}}


def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure without pyplot, which needs no display, and the array of its axes. With 150 dots per inch, text of 10
    points is legible at half the size."""
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def add_legend(figure: Figure, columns: int) -> None:
    """Add one legend for all axes, below them."""
    names: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        names |= dict(zip(labels, handles, strict=True))
    if names:
        figure.legend(names.values(), names, loc="outside lower center", ncols=columns, frameon=False)


def plot_lines(
    panels: Panels, along: str, what: Sequence[str], path: str | Path, levels: Mapping[str, float] | None = None
) -> None:
    """Draw lines of points (x, a value for each of `what`). Each panel and each of `what` has its own axes; a name has
    one colour. Dashed lines are `levels`. Wide ranges of x have a log axis."""
    rows, columns = (len(panels), len(what)) if len(what) > 1 else (1, len(panels))
    figure, axes = subplots(rows, columns, (7.0 if columns == 1 else 4.5 * columns, 3.0 * rows + 1.0))
    names = dict.fromkeys(name for lines in panels.values() for name in lines)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    places = [x for lines in panels.values() for points in lines.values() for x, *_ in points]
    cells = itertools.product(panels.items(), enumerate(what, 1))
    for axis, ((title, lines), (column, label)) in zip(axes.flat, cells, strict=True):
        for name, points in lines.items():
            values = [point[column] for point in points]
            axis.plot([x for x, *_ in points], values, "o-", markersize=4, color=colours[name], label=name)
        for name, level in (levels or {}).items():
            axis.axhline(level, linestyle="--", color="grey")
            axis.annotate(name, (1, level), xycoords=axis.get_yaxis_transform(), ha="right", va="bottom")
        if min(places) > 0 and max(places) / min(places) >= 8:
            axis.set_xscale("log")
            if len(set(places)) < 8:
                axis.set_xticks(sorted(set(places)))
                axis.minorticks_off()
            axis.xaxis.set_major_formatter("{x:,g}")
        axis.set(title=title, xlabel=along, ylabel=label)
        axis.grid(alpha=0.3)
    add_legend(figure, min(2, columns))
    figure.savefig(path)


def plot_drift(drifts: Panels, path: str | Path) -> None:
    """Draw a heatmap of mean similarities for each file, {label: result of drift}, and below, the curves of all files
    by distance (the ranking-sentences paper's Figure 1). The heatmaps share a scale and leave the diagonal of ones
    out."""
    figure = Figure(figsize=(max(7.0, 3.0 * len(drifts)), 6.4), dpi=150, layout="constrained")
    axes = figure.subplot_mosaic([[*drifts], [""] * len(drifts)])
    maps = {label: np.array(drift["similarity"], dtype=float) for label, drift in drifts.items()}
    for values in maps.values():
        np.fill_diagonal(values, np.nan)
    lowest, highest = (limit([limit(values) for values in maps.values()]) for limit in (np.nanmin, np.nanmax))
    for label, values in maps.items():
        image = axes[label].imshow(values, vmin=lowest, vmax=highest)
        axes[label].locator_params(nbins=4, integer=True)
        axes[label].set(title=label, xlabel="place in the chain")
    figure.colorbar(image, ax=[axes[label] for label in drifts], label="mean cosine")
    for (label, drift), colour in zip(drifts.items(), itertools.cycle(COLOURS), strict=False):
        curve = drift["by_distance"][1:]
        axes[""].plot(range(1, len(curve) + 1), curve, "o-", markersize=4, color=colour, label=label)
    axes[""].locator_params(axis="x", integer=True)
    axes[""].set(xlabel="distance of two sentences in the chain", ylabel="mean cosine")
    axes[""].spines[["top", "right"]].set_visible(False)
    add_legend(figure, len(drifts))
    figure.savefig(path)


def plot_tradeoff(panels: Panels, before: Panels, path: str | Path) -> None:
    """Draw polarity scores against semantic scores, {name: (P, S)} for each task, with the Pareto front of trained
    encoders; encoders before training are stars."""
    figure, axes = subplots(len(panels), 1, (9.0, 4.2 * len(panels)))
    for axis, (task, points) in zip(axes.flat, panels.items(), strict=True):
        names: dict[tuple[float, float], str] = {}  # one run under two names counts once
        for (name, point), kept in zip(points.items(), pareto(list(points.values())), strict=True):
            if kept:
                names.setdefault(point, name)
        best = sorted(names)
        axis.plot([p for p, _ in best], [s for _, s in best], color=COLOURS[0], linewidth=1)
        for number, point in enumerate(best, 1):
            axis.plot(*point, "o", color=COLOURS[0], markersize=5, label=f"{number}  {names[point]}")
            place = (4, -12 if number == 2 else 4)  # the first two are often close together
            axis.annotate(str(number), point, xytext=place, textcoords="offset points")
        for (name, point), colour in zip(before[task].items(), itertools.cycle(COLOURS[2:]), strict=False):
            axis.plot(*point, "*", color=colour, markersize=10, label=name)
        rest = np.array([*points.values()]).reshape(-1, 2).T
        axis.plot(*rest, "o", color=COLOURS[-1], markersize=4, zorder=1, label="other runs")
        axis.set(title=task, xlabel=POLARITY[0], ylabel=POLARITY[1])
        axis.margins(0.1)
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def plot_rows(panels: Panels, path: str | Path) -> None:
    """Draw {title: {model: {task: (low, value, high) or None}}}: a panel for each title, a row for each task, and a
    mark with its interval for each model."""
    tasks = {title: list(dict.fromkeys(task for row in of.values() for task in row)) for title, of in panels.items()}
    models = list(dict.fromkeys(model for of in panels.values() for model in of))
    height = sum(1.2 + (0.2 + 0.1 * len(models)) * len(of) for of in tasks.values())
    figure, axes = subplots(len(panels), 1, (7.0, height))
    looks = {model: (COLOURS[n % len(COLOURS)], MARKS[n % len(MARKS)]) for n, model in enumerate(models)}
    for axis, (title, of) in zip(axes.flat, panels.items(), strict=True):
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
    add_legend(figure, 2)
    figure.savefig(path)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point, whether no other one is at least as high in both values and higher in one."""
    return [not any(p >= a and s >= b and (p, s) != (a, b) for p, s in points) for a, b in points]
