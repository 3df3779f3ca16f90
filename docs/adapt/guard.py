"""Draw guard.png: the change elsewhere against two guards, a point for each encoder of guard.jsonl."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
rows = [json.loads(line) for line in (FOLDER / "guard.jsonl").read_text(encoding="utf-8").splitlines()]
plot, panels = plt.subplots(1, 2, figsize=(8, 3.5), sharey=True, layout="constrained")
for axes, guard in zip(panels, ("phrases", "training texts"), strict=True):
    for target in dict.fromkeys(row["target"] for row in rows):
        points = [(row["guards"][guard], row["elsewhere"]) for row in rows if row["target"] == target]
        axes.plot(*zip(*points, strict=True), "o", label=target)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xlabel=f"guard on {guard}", xlim=(0, 103))
panels[0].axvline(70, color="grey", linewidth=0.8, linestyle="--")
panels[0].set(ylabel="change elsewhere, Spearman x 100")
panels[0].legend(frameon=False)
plot.savefig(FOLDER / "guard.png", dpi=110)
