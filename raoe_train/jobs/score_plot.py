"""What the job `score` draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from raoe_train.artifacts import figures


def plot_scores_by_label(groups: Mapping[str, np.ndarray], path: str | Path, *, bins: int = 60) -> None:
    """The distribution of similarity scores by NLI label: the RAOE paper's Figure 1.

    Args:
        groups: {label: scores [n]}; each group's area is 1, so that groups of different size compare.
        path: file to write; its suffix names the format.
        bins: of the histograms, over the range of all scores.
    """
    made, axes = figures.figure()
    filled = {label: np.asarray(scores) for label, scores in groups.items() if len(scores)}
    if not filled:
        raise ValueError("groups is empty: there are no scores to draw")
    edges = np.histogram_bin_edges(np.concatenate(list(filled.values())), bins=bins)
    for (label, scores), colour in zip(filled.items(), figures.colours(len(filled)), strict=True):
        name = f"{label} ({len(scores)} pairs, mean {scores.mean():.3f})"
        axes.hist(scores, edges, density=True, histtype="stepfilled", alpha=0.35, color=colour)
        axes.hist(scores, edges, density=True, histtype="step", color=colour, label=name)
    axes.set(xlabel="similarity score S", ylabel="density")
    axes.legend(frameon=False)
    figures.save(made, path)
