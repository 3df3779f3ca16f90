"""Plots of sweeps, reports and analyses. Each writes `path`, whose suffix names the format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import figures

Panels = Mapping[str, Mapping[str, Any]]  # of each panel its lines, points or rows, by name


def plot_drift(found: Mapping[str, Mapping[str, Any]], path: str | Path) -> None:
    """Of each method, {label: what drift found}, a heatmap of mean similarities, all on one scale of colours without
    the diagonal, which is 1, and the curves of all methods by distance (the ranking-sentences paper's Figure 1)."""
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


def plot_curves(
    lines: Mapping[str, Mapping[float, float]], before: Mapping[str, float], along: str, path: str | Path
) -> None:
    """Main metrics along something: of each family of variants a line {x: metric} in order of x, and a level one of
    each encoder before training."""
    made, axes = figures.figure(size=(7.0, 4.5))
    for family, points in lines.items():
        axes.plot([*points], [*points.values()], marker="o", label=family)
    for name, metric in before.items():
        axes.axhline(metric, linestyle="--", color="grey", label=name)
    if _spreads([x for points in lines.values() for x in points]):
        axes.set_xscale("log")
    axes.set(xlabel=along, ylabel="main metric x 100, average over tasks (or dev)")
    axes.legend()
    figures.save(made, path)


def plot_polarity(panels: Panels, along: str, path: str | Path) -> None:
    """Polarity scores P (solid) and semantic scores S (dotted) along something: of each task a panel, {line: (x, P, S)
    in order of x}."""
    made, axes = figures.figure(1, len(panels), size=(6.0 * len(panels), 4.2))
    for axis, (task, lines) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for (name, points), colour in zip(lines.items(), figures.colours(len(lines)), strict=True):
            x, polarity, similarity = zip(*points, strict=True)
            axis.plot(x, polarity, "o-", markersize=3, color=colour, label=name)
            axis.plot(x, similarity, "o:", markersize=3, color=colour)
        if _spreads([x for points in lines.values() for x, *_ in points]):
            axis.set_xscale("log")
        axis.set(title=task, xlabel=along, ylabel="P (solid) and S (dotted), x 100")
        axis.legend(frameon=False, fontsize="small")
    figures.save(made, path)


def plot_tradeoff(panels: Panels, before: Panels, path: str | Path) -> None:
    """Polarity scores against semantic scores: of each task a panel, {name: (P, S)}, with the front of what nothing
    else beats in both; encoders before training are marked, and no part of the front."""
    made, axes = figures.figure(1, len(panels), size=(6.0 * len(panels), 6.0))
    for axis, (task, points) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        axis.plot(*zip(*points.values(), strict=True), "o", color=figures.COLOURS[-1], markersize=4)
        names: dict[tuple[float, float], str] = {}  # of equal points, as of one run under two names, the first
        for (name, point), kept in zip(points.items(), pareto(list(points.values())), strict=True):
            if kept:
                names.setdefault(point, name)
        best = sorted(names)
        axis.plot(*zip(*best, strict=True), color=figures.COLOURS[0], linewidth=1)
        for number, point in enumerate(best, 1):
            axis.plot(*point, "o", color=figures.COLOURS[0], markersize=5, label=f"{number}  {names[point]}")
            axis.annotate(str(number), point, fontsize="small", xytext=(4, 4), textcoords="offset points")
        starts = before.get(task, {})
        for (name, point), colour in zip(starts.items(), figures.colours(len(starts) + 2)[2:], strict=True):
            axis.plot(*point, "*", color=colour, markersize=10, label=name)
        axis.set(title=task, xlabel="polarity score P x 100", ylabel="semantic score S x 100")
        axis.margins(0.1)
        axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figures.save(made, path)


def plot_main_metrics(metrics: Panels, path: str | Path) -> None:
    """{kind: {model: {task: main metric, or None}}}: a panel each kind, a row each task, a mark each model."""
    rows = sum(len(next(iter(of.values()))) for of in metrics.values())
    made, axes = figures.figure(len(metrics), 1, (7.0, 1.2 * len(metrics) + 0.35 * rows))
    models = dict.fromkeys(model for of in metrics.values() for model in of)
    colours = dict(zip(models, figures.colours(len(models)), strict=True))
    for axis, (kind, of) in zip(np.atleast_1d(axes), metrics.items(), strict=True):
        tasks = list(next(iter(of.values())))
        for (model, row), mark in zip(of.items(), itertools.cycle(figures.MARKS), strict=False):
            values = [np.nan if row[task] is None else row[task] for task in tasks]
            axis.plot(values, range(len(tasks)), mark, color=colours[model], label=model)
        axis.set(title=kind, xlabel="main metric x 100")
        _task_rows(axis, tasks)
        axis.grid(axis="y", alpha=0.3)
    figures.save(made, path)


def plot_differences(differences: Panels, first: str, path: str | Path) -> None:
    """{model: {task: {"difference", "low", "high"}}} from a first model: a row each task, a mark and its interval each
    other model."""
    tasks = list(dict.fromkeys(task for rows in differences.values() for task in rows))
    made, axes = figures.figure(size=(7.0, 1.4 + (0.2 + 0.2 * len(differences)) * len(tasks)))
    colours = figures.colours(len(differences))
    for number, ((model, rows), colour) in enumerate(zip(differences.items(), colours, strict=True)):
        height = 0.7 * ((number + 0.5) / len(differences) - 0.5)
        places = [tasks.index(task) + height for task in rows]
        for row, place in zip(rows.values(), places, strict=True):
            axes.plot([row["low"], row["high"]], [place, place], color=colour)
        values = [row["difference"] for row in rows.values()]
        axes.plot(values, places, figures.MARKS[number % len(figures.MARKS)], color=colour, label=model)
    axes.axvline(0, color="grey", linewidth=1)
    axes.set(xlabel=f"difference from {first}, 95 % interval")
    _task_rows(axes, tasks)
    figures.save(made, path)


def plot_dependency(label: str, values: np.ndarray, path: str | Path) -> None:
    """Box plot of what dependency found of one encoder, a triangle at the mean (the BeLLM paper's Figures 2 and 5).

    Undefined values are left out; ValueError where none is left.
    """
    defined = values[~np.isnan(values)]
    if not len(defined):
        raise ValueError("there are no correlations to draw: no sentence has one")
    made, axes = figures.figure()
    axes.boxplot([defined], showmeans=True, flierprops={"markersize": 2})
    axes.set_xticks([1], [f"{label}\n({len(defined)} sentences, mean {defined.mean():.3f})"])
    axes.set_ylabel("Spearman of pivot and other tokens")
    figures.save(made, path)


def plot_degradation(label: str, result: Mapping[str, Any], path: str | Path) -> None:
    """Averages over the number of layers kept, the best marked (the BeLLM paper's Figure 4). An undefined average
    leaves a gap."""
    made, axes = figures.figure()
    layers, averages = np.array(result["layers"]), np.array(result["average"], dtype=float)
    if np.isfinite(averages).any():
        best = np.nanargmax(averages)
        label = f"{label} (best {averages[best]:.2f}, {layers[best]} layers)"
        axes.plot(layers[best], averages[best], "*", markersize=14, color=figures.COLOURS[0])
    axes.plot(layers, averages, "o-", markersize=3, color=figures.COLOURS[0], label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="layers kept", ylabel="average Spearman x100")
    axes.legend(frameon=False)
    figures.save(made, path)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each point whether none other is at least as high in both and higher in one."""
    return [not any(p >= a and s >= b and (p, s) != (a, b) for p, s in points) for a, b in points]


def _spreads(values: Sequence[float]) -> bool:
    """Whether values want a logarithmic axis."""
    return min(values) > 0 and max(values) / min(values) >= 8


def _task_rows(axis: Any, tasks: Sequence[str]) -> None:
    """Tasks from top to bottom along an axis, and the legend."""
    axis.set(yticks=range(len(tasks)), ylim=(len(tasks) - 0.5, -0.5))
    axis.set_yticklabels(tasks)
    axis.legend(frameon=False, fontsize="small")
