"""What a run gained and lost, in plain words and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raoe_train.artifacts import figures
from raoe_train.training.measures import scores

LITTLE, LOST = 1.0, -0.2  # points of a gain, and of the average elsewhere, that want advice


def changes(metrics: Mapping[str, Any]) -> dict[str, float]:
    """{dev or a task: its main metric x 100 after training less that before}, as far as both are there."""
    found = scores(metrics).items()
    return {name: after - before for name, (before, after) in found if before is not None and after is not None}


def in_words(metrics: Mapping[str, Any]) -> list[str]:
    """Sentences on the scores of metrics.json, and what to try next; none where nothing was measured."""
    found, keep = changes(metrics), metrics.get("keep", 0)
    if not found:
        return []
    said, more, less = [], f"a smaller training.keep than {keep:g}, " if keep else "", "a larger" if keep else "some"
    if (gain := found.pop("dev", None)) is not None:
        before, after = scores(metrics)["dev"]
        said.append(f"On its development pairs the encoder went from {before:.2f} to {after:.2f} ({gain:+.2f}).")
    if not found:
        said.append("What else it gained or lost was not measured: evaluation.tasks and data.dir name sets to watch.")
    else:
        mean = sum(found.values()) / len(found)
        least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        ends = f": from {found[least]:+.2f} ({least}) to {found[most]:+.2f} ({most})" if len(found) > 1 else ""
        said.append(f"On {len(found)} set{'s' * (len(found) > 1)} at hand it changed by {mean:+.2f} on average{ends}.")
        if mean < LOST:
            said.append(f"To lose less: {less} training.keep.")
            said.append("To lose nothing: this encoder for texts like its training's, the one before for others.")
    if gain is not None and gain < LITTLE:
        said.append(f"To gain more: {more}more pairs, more epochs.")
    return said


def plot_changes(metrics: Mapping[str, Any], path: Path) -> list[Path]:
    """A bar for each of `changes`; nothing for fewer than two."""
    found = changes(metrics)
    if len(found) < 2:
        return []
    made, axes = figures.figure(size=(7.0, 1.0 + 0.3 * len(found)))
    gain, loss = figures.COLOURS[1], figures.COLOURS[2]
    bars = axes.barh([*found], [*found.values()], color=[gain if change >= 0 else loss for change in found.values()])
    axes.bar_label(bars, [f"{change:+.2f}" for change in found.values()], padding=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set(xlabel="main metric x 100, after training less before")
    figures.save(made, path)
    return [path]
