"""Draw guard.png: change elsewhere against the guard, a point for each candidate of trials.jsonl."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
rows = [json.loads(line) for line in (FOLDER / "trials.jsonl").read_text(encoding="utf-8").splitlines()]
plot, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for target in dict.fromkeys(row["target"] for row in rows):
    of_target = [row for row in rows if row["target"] == target]
    start = next(row["elsewhere"] for row in of_target if row["candidate"] == "start")
    axes.plot([row["guard"] for row in of_target], [row["elsewhere"] - start for row in of_target], "o", label=target)
axes.axhline(0, color="grey", linewidth=0.8)
axes.axvline(60, color="grey", linewidth=0.8, linestyle="--")
axes.set(xlabel="guard: agreement with the start", ylabel="change elsewhere, Spearman x 100")
axes.legend(frameon=False)
plot.savefig(FOLDER / "guard.png", dpi=110)
