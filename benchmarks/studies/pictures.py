"""Draw pictures of the pages in docs from the rows beside them: `python -m benchmarks.studies.pictures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import plots
from benchmarks.studies.sweep_report import curves, frame, sides

DOCS = Path(__file__).parents[2] / "docs"
SETS = {"sst2": "SST-2", "sarcastic_headlines": "headlines"}
LOSSES = {  # of the runs SET-ENCODER-NAME of the margins study
    "small": "triplets, margin 0.1, three seeds",
    "default": "triplets, margin 5, three seeds",
    "triplet": "triplets",
    "contrastive": "contrastive",
    "online": "online contrastive",
    "negatives": "multiple negatives",
    "negatives-once": "multiple negatives, no duplicates",
    "setfit": "SetFit's random pairs",
    "euclidean": "triplets, euclidean distance",
    "size": "triplets, margin 0.1",
    "size-default": "triplets, margin 5",
}
VALUES = {"loss.margin": "margin {:g}", "data.max_rows": "{:,} examples"}
BEFORE = {  # P and S in docs/margins/report.md
    "SST-2": {"MiniLM before training": (62.60, 48.19), "demo encoder before training": (52.95, 22.71)},
    "headlines": {"MiniLM before training": (62.48, 39.85), "demo encoder before training": (53.71, 9.50)},
}
STARTS = {"minilm": "from MiniLM", "scratch": "from random weights"}
WEIGHTS = {"rank_weight": "weight of the rank part", "angle_weight": "weight of the angular part"}
GUARDS = {"phrases": "Random phrases: the guard of adapt", "training texts": "Training texts: the earlier guard"}


def read(path: str) -> Any:
    text = (DOCS / path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.endswith("l") else json.loads(text)


def margins() -> None:
    runs = frame(read("margins/results.jsonl"), [side for name in SETS for side in sides(name)])
    _, encoder, name = zip(*runs["family"].str.split("-", n=2), strict=True)
    runs["family"] = [LOSSES[each] for each in name]
    runs["label"] = runs["family"] + [
        "".join(", " + VALUES[key].format(value) for key, value in point.items()) for point in runs["point"]
    ]
    runs.loc[np.array(encoder) == "demo", "label"] += ", demo"
    points = {}
    for task, words in SETS.items():
        means = runs.groupby("label", sort=False)[sides(task)].mean().dropna()
        points[words] = {label: (p, s) for label, p, s in means.itertuples(name=None)}
    plots.plot_tradeoff(points, BEFORE, DOCS / "margins/polarity-against-similarity.png")
    minilm = runs[np.array(encoder) == "minilm"]
    for key, along in (("loss.margin", "margin"), ("data.max_rows", "number of training examples")):
        lines = {words: curves(minilm, key, minilm[sides(task)]) for task, words in SETS.items()}
        path = DOCS / f"margins/polarity-{key.rpartition('.')[2]}.png"
        plots.plot_lines({words: of for words, of in lines.items() if of}, along, plots.POLARITY, path)
    rows = read("margins/retrieved.jsonl")
    lines = {words: {"": [(row["k"], *row[task].values()) for row in rows]} for task, words in SETS.items()}
    plots.plot_lines(lines, "k, the number of retrieved sentences", plots.POLARITY, DOCS / "margins/polarity-k.png")


def ablation() -> None:
    """The mean of two dev sets: axes for each start."""
    runs = frame(read("results/ablation/results.jsonl"), ["average"])
    runs["family"] = runs["family"].str.partition("-")[0]
    for key, along in {"margin": "margin (ranks within a batch)", **WEIGHTS}.items():
        panels: dict[str, dict[str, Any]] = {words: {} for words in STARTS.values()}
        for name, points in curves(runs, f"loss.{key}", runs[["average"]]).items():
            start, _, rest = name.partition(", ")
            other, _, value = rest.partition(" ")
            panels[STARTS[start]][f"{WEIGHTS[other]}: {value}" if other else ""] = points
        what = "mean of STS-B dev and SICK dev\n(Spearman x 100)"
        plots.plot_lines(panels, along, [what], DOCS / f"results/ablation/{key}.png")


def guard() -> None:
    """The change elsewhere against two guards, a point for each encoder."""
    rows = read("adapt/guard.jsonl")
    figure, axes = plots.subplots(1, 2, (9.0, 4.4))
    for axis, (name, title) in zip(axes.flat, GUARDS.items(), strict=True):
        targets = dict.fromkeys(row["target"] for row in rows)
        for target, colour, mark in zip(targets, plots.COLOURS, plots.MARKS, strict=False):
            points = [(row["guards"][name], row["elsewhere"]) for row in rows if row["target"] == target]
            axis.plot(*zip(*points, strict=True), mark, color=colour, label=f"trained on {target}")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(title=title, xlabel="guard (correlation x 100)", xlim=(0, 103))
    axes[0, 0].axvline(70, color="grey", linestyle="--")
    axes[0, 0].annotate("lowest guard\nthat adapt saves", (68, -6), ha="right")
    axes[0, 0].set(ylabel="change of the scores elsewhere\n(Spearman x 100)")
    plots.add_legend(figure, 3)
    figure.savefig(DOCS / "adapt/guard.png")


def chains() -> None:
    found = {label: np.array(values) for label, values in read("generation/drift.json").items()}
    by_distance = {label: [values.diagonal(k).mean() for k in range(len(values))] for label, values in found.items()}
    drifts = {label: {"similarity": found[label], "by_distance": by_distance[label]} for label in found}
    plots.plot_drift(drifts, DOCS / "generation/drift.png")


def scores_by_label() -> None:
    figure, axes = plots.subplots(1, 1, (7.5, 4.4))
    for (label, of), colour in zip(read("study/snli-scores-by-label.json").items(), plots.COLOURS, strict=False):
        counts, edges = np.array(of["counts"]), np.linspace(*of["range"], len(of["counts"]) + 1)
        density = counts / counts.sum() / np.diff(edges)
        axes[0, 0].stairs(density, edges, color=colour, linewidth=1.5, label=f"{label}, mean {of['mean']:.2f}")
    axes[0, 0].set(xlabel="score: mean of the cosines of MiniLM and mpnet", ylabel="density of SNLI's pairs")
    plots.add_legend(figure, 3)
    figure.savefig(DOCS / "study/snli-scores-by-label.png")


def main() -> None:
    for draw in (margins, ablation, guard, chains, scores_by_label):
        draw()


if __name__ == "__main__":
    main()
