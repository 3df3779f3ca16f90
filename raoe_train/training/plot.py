"""A training run as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import figures

# Keys of a training log entry that are no parts of the loss.
NOT_PARTS = {"loss", "step", "epoch", "learning_rate", "grad_norm", "num_input_tokens_seen", "entropy"}


def plot_run(log_history: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Losses over steps and, on a second axis, the Spearman correlations of evaluations, x100.

    Args:
        log_history: the trainer's log entries: "step" with "loss" (and parts of it) or "eval_..._spearman_cosine".
        path: file to write; its suffix names the format.

    Returns:
        [path].
    """
    made, axes = figures.figure()
    parts = {key for entry in log_history if "loss" in entry for key in entry} - NOT_PARTS
    losses = ["loss", *sorted(parts)]
    correlations = sorted({key for entry in log_history for key in entry if key.endswith("spearman_cosine")})
    colours = iter(figures.colours(len(losses) + len(correlations)))
    for key in losses:
        axes.plot(*_series(log_history, key), color=next(colours), label=key)
    axes.set(xlabel="step", ylabel="training loss")
    if correlations:
        right = axes.twinx()
        right.set_ylabel("Spearman x100")
        for key in correlations:
            name = key.removeprefix("eval_").removesuffix("_spearman_cosine")
            steps, values = _series(log_history, key)
            right.plot(steps, 100 * values, "o-", markersize=3, color=next(colours), label=f"{name} (right)")
    made.legend(loc="outside upper center", ncols=5, frameon=False)
    figures.save(made, path)
    return [path]


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """The steps that have a key, and its values there, [2, n]."""
    points = [(entry["step"], float(entry[key])) for entry in log_history if key in entry and "step" in entry]
    return np.array(points, dtype=float).reshape(-1, 2).T
