"""Plots of scores, training runs and chains, drawn without a display."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts.writing import replacing

logger = logging.getLogger(__name__)

# Okabe and Ito's colours, told apart by colour-blind readers too
COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKS = "osD^vP"


def plot_scores_by_label(groups: Mapping[str, np.ndarray], path: str | Path, *, bins: int = 60) -> None:
    """The distribution of similarity scores by NLI label: the RAOE paper's Figure 1.

    Args:
        groups: {label: scores [n]}; each group's area is 1, so that groups of different size compare.
        path: file to write; its suffix names the format.
        bins: of the histograms, over the range of all scores.
    """
    figure, axes = _figure()
    filled = {label: np.asarray(scores) for label, scores in groups.items() if len(scores)}
    if not filled:
        raise ValueError("groups is empty: there are no scores to draw")
    edges = np.histogram_bin_edges(np.concatenate(list(filled.values())), bins=bins)
    for (label, scores), colour in zip(filled.items(), _colours(len(filled)), strict=True):
        name = f"{label} ({len(scores)} pairs, mean {scores.mean():.3f})"
        axes.hist(scores, edges, density=True, histtype="stepfilled", alpha=0.35, color=colour)
        axes.hist(scores, edges, density=True, histtype="step", color=colour, label=name)
    axes.set(xlabel="similarity score S", ylabel="density")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_run(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """A training run: losses over steps and, on a second axis, the Spearman correlations of its evaluations,
    x100.

    Args:
        log_history: the trainer's log entries: "step" with "loss" (and parts of it) or
            "eval_..._spearman_cosine".
        path: file to write; its suffix names the format.
    """
    figure, axes = _figure()
    losses = {"loss": _series(log_history, "loss")}
    parts = {key for entry in log_history if "loss" in entry for key in entry} - NOT_PARTS
    losses.update((key, _series(log_history, key)) for key in sorted(parts))
    correlations = {
        key: _series(log_history, key)
        for key in sorted({key for entry in log_history for key in entry if key.endswith("spearman_cosine")})
    }
    colours = iter(_colours(len(losses) + len(correlations)))
    for key, (steps, values) in losses.items():
        axes.plot(steps, values, color=next(colours), label=key)
    axes.set(xlabel="step", ylabel="training loss")
    handles, names = axes.get_legend_handles_labels()
    if correlations:
        right = axes.twinx()
        right.set_ylabel("Spearman x100")
        for key, (steps, values) in correlations.items():
            name = key.removeprefix("eval_").removesuffix("_spearman_cosine")
            right.plot(steps, 100 * values, "o-", markersize=3, color=next(colours), label=f"{name} (right)")
        more = right.get_legend_handles_labels()
        handles, names = handles + more[0], names + more[1]
    axes.legend(handles, names, frameon=False)
    _save(figure, path)


def plot_drift(found: Mapping[str, Mapping[str, Any]], path: str | Path) -> None:
    """Chains of sentences: for each method a heatmap of mean similarities, all on one scale of colours without the
    diagonal, which is 1, and the curves of all methods by distance (the ranking-sentences paper's Figure 1).

    Args:
        found: {label: what raoe_train.studies.drift.drift found}.
        path: file to write; its suffix names the format.
    """
    figure, axes = _figure(1, len(found) + 1, size=(3.6 * (len(found) + 1), 3.4))
    maps = [np.where(np.eye(len(drifted["similarity"])), np.nan, drifted["similarity"]) for drifted in found.values()]
    lowest, highest = min(map(np.nanmin, maps)), max(map(np.nanmax, maps))
    for axis, label, values in zip(axes, found, maps, strict=False):
        image = axis.imshow(values, vmin=lowest, vmax=highest)
        axis.set(title=label, xlabel="place in the chain")
    figure.colorbar(image, ax=axes[-2], label="mean cosine")
    for (label, drifted), colour in zip(found.items(), _colours(len(found)), strict=True):
        apart = drifted["by_distance"][1:]
        axes[-1].plot(range(1, len(apart) + 1), apart, "o-", markersize=3, color=colour, label=label)
    axes[-1].locator_params(axis="x", integer=True)
    axes[-1].set(xlabel="distance in the chain", ylabel="mean cosine")
    axes[-1].legend(frameon=False)
    _save(figure, path)


def plot_curves(
    lines: Mapping[str, Sequence[tuple[float, float]]], before: Mapping[str, float], along: str, path: str | Path
) -> None:
    """Scores along something, a line each family of a sweep's variants, and level ones of encoders before training.

    Args:
        lines: {family: [(x, score), …] in order of x}.
        before: {name: score}.
        along: what x is.
        path: file to write; its suffix names the format.
    """
    figure, axes = _figure(size=(7.0, 4.5))
    for family, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=family)
    for name, score in before.items():
        axes.axhline(score, linestyle="--", color="grey", label=name)
    if spreads([x for points in lines.values() for x, _ in points]):
        axes.set_xscale("log")
    axes.set(xlabel=along, ylabel="main metric x 100, average over tasks (or dev)")
    axes.legend()
    _save(figure, path)


def plot_polarity(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]], along: str, path: str | Path
) -> None:
    """Polarity scores (solid) and semantic scores (dotted) along something, a panel each task.

    Args:
        panels: {task: {line: [(x, P, S), …] in order of x}}.
        along: what x is.
        path: file to write; its suffix names the format.
    """
    figure, axes = _figure(1, len(panels), size=(6.0 * len(panels), 4.2))
    for axis, (task, lines) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for (name, points), colour in zip(lines.items(), _colours(len(lines)), strict=True):
            x, polarity, similarity = zip(*points, strict=True)
            axis.plot(x, polarity, "o-", markersize=3, color=colour, label=name)
            axis.plot(x, similarity, "o:", markersize=3, color=colour)
        values = [x for points in lines.values() for x, *_ in points]
        if spreads(values):
            axis.set_xscale("log")
        axis.set(title=task, xlabel=along, ylabel="P (solid) and S (dotted), x 100")
        axis.legend(frameon=False, fontsize="small")
    _save(figure, path)


def plot_tradeoff(
    panels: Mapping[str, Mapping[str, tuple[float, float]]],
    before: Mapping[str, Mapping[str, tuple[float, float]]],
    path: str | Path,
) -> None:
    """Polarity scores against semantic scores, a panel each task, with the front of what nothing else beats in both.

    Args:
        panels: {task: {name: (P, S)}}.
        before: the same of encoders before training; marked, and no part of the front.
        path: file to write; its suffix names the format.
    """
    figure, axes = _figure(1, len(panels), size=(6.0 * len(panels), 6.0))
    for axis, (task, points) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        axis.plot(*zip(*points.values(), strict=True), "o", color=COLOURS[-1], markersize=4)
        names: dict[tuple[float, float], str] = {}  # of equal points, as of one run under two names, the first
        for (name, point), kept in zip(points.items(), pareto(list(points.values())), strict=True):
            if kept:
                names.setdefault(point, name)
        best = sorted(names)
        axis.plot(*zip(*best, strict=True), color=COLOURS[0], linewidth=1)
        for number, point in enumerate(best, 1):
            axis.plot(*point, "o", color=COLOURS[0], markersize=5, label=f"{number}  {names[point]}")
            axis.annotate(str(number), point, fontsize="small", xytext=(4, 4), textcoords="offset points")
        starts = before.get(task, {})
        for (name, point), colour in zip(starts.items(), _colours(len(starts) + 2)[2:], strict=True):
            axis.plot(*point, "*", color=colour, markersize=10, label=name)
        axis.set(title=task, xlabel="polarity score P x 100", ylabel="semantic score S x 100")
        axis.margins(0.1)
        axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12))
    _save(figure, path)


def plot_task_scores(scores: Mapping[str, Mapping[str, Mapping[str, float | None]]], path: str | Path) -> None:
    """Main metrics, a panel each kind of task, a row each task, a mark each model.

    Args:
        scores: {kind: {model: {task: score, None where there is none}}}.
        path: file to write; its suffix names the format.
    """
    rows = sum(len(next(iter(of.values()))) for of in scores.values())
    figure, axes = _figure(len(scores), 1, (7.0, 1.2 * len(scores) + 0.35 * rows))
    models = list(dict.fromkeys(model for of in scores.values() for model in of))
    colours = dict(zip(models, _colours(len(models)), strict=True))
    for axis, (kind, of) in zip(np.atleast_1d(axes), scores.items(), strict=True):
        tasks = list(next(iter(of.values())))
        for number, (model, row) in enumerate(of.items()):
            values = [np.nan if row[task] is None else row[task] for task in tasks]
            axis.plot(values, range(len(tasks)), MARKS[number % len(MARKS)], color=colours[model], label=model)
        axis.set(title=kind, xlabel="main metric x 100", yticks=range(len(tasks)), ylim=(len(tasks) - 0.5, -0.5))
        axis.set_yticklabels(tasks)
        axis.grid(axis="y", alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    _save(figure, path)


def plot_differences(
    differences: Mapping[str, Mapping[str, Mapping[str, float]]], first: str, path: str | Path
) -> None:
    """Differences from the first model with their intervals, a row each task, a mark each other model.

    Args:
        differences: {model: {task: {"difference", "low", "high"}}}.
        first: the model that they are from.
        path: file to write; its suffix names the format.
    """
    tasks = list(dict.fromkeys(task for rows in differences.values() for task in rows))
    figure, axes = _figure(size=(7.0, 1.4 + (0.2 + 0.2 * len(differences)) * len(tasks)))
    for number, ((model, rows), colour) in enumerate(zip(differences.items(), _colours(len(differences)), strict=True)):
        height = 0.7 * ((number + 0.5) / len(differences) - 0.5)
        for task, row in rows.items():
            place = tasks.index(task) + height
            axes.plot([row["low"], row["high"]], [place, place], color=colour)
        axes.plot(
            [row["difference"] for row in rows.values()],
            [tasks.index(task) + height for task in rows],
            MARKS[number % len(MARKS)],
            color=colour,
            label=model,
        )
    axes.axvline(0, color="grey", linewidth=1)
    axes.set(xlabel=f"difference from {first}, 95 % interval", yticks=range(len(tasks)), ylim=(len(tasks) - 0.5, -0.5))
    axes.set_yticklabels(tasks)
    axes.legend(frameon=False, fontsize="small")
    _save(figure, path)


def pictures(draw: Callable[[], list[Path]]) -> list[str]:
    """Markdown lines that show the plots that `draw` makes; none where there is nothing to draw with."""
    try:
        made = draw()
    except ImportError as error:
        logger.warning("no plots: %s", error)
        return []
    return [line for plot in made for line in ("", f"![{plot.stem}]({plot.name})")]


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each point whether none other is at least as high in both and higher in one."""
    return [not any(p >= a and s >= b and (p, s) != (a, b) for p, s in points) for a, b in points]


def spreads(values: Sequence[float]) -> bool:
    """Whether values want a logarithmic axis."""
    return min(values) > 0 and max(values) / min(values) >= 8


NOT_PARTS = frozenset({"loss", "step", "epoch", "learning_rate", "grad_norm", "num_input_tokens_seen", "entropy"})
"""Keys of a training log entry that are no parts of the loss."""


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(entry["step"], float(entry[key])) for entry in log_history if key in entry and "step" in entry]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def _colours(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 4.2)) -> tuple[Any, Any]:
    # the object-oriented interface with the Agg canvas leaves the user's pyplot backend alone
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def _save(figure: Any, path: str | Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
