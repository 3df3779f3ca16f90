"""Draw the bar chart of README.md, front.png, from committed results. `python docs/front.py`."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
OURS, OTHER = "#0072b2", "#999999"
SETS = ("SNLI", "SICK", "STS-B")
CONTENDERS = {"by length": "raoe", "sentence-transformers": "sentence-transformers 6.2"}
BEFORE = {"sick": 77.15, "stsb": 82.02, "sts12": 72.37, "sts14": 75.60, "sts15": 85.39}
VARIANTS = {"sick": "adapt", "sick-free": "adapt without\nregularizer"}
VARIANTS |= {"sick-cosent-free": "CoSENT", "sick-mse-free": "MSE"}


def rows(paths):
    return [json.loads(line) for path in sorted(paths) for line in path.read_text(encoding="utf-8").splitlines()]


seconds = {}
for row in rows((ROOT / "benchmarks/results").glob("AMD-*.jsonl")):
    timed = row["op"] == "train_step" and "median_s" in row and row["contender"] in CONTENDERS
    if timed and ", 512 pairs, MiniLM" in row["title"]:
        seconds.setdefault((row["date"], row["title"].split(",")[0], row["contender"]), row["median_s"])
seconds = {key[1:]: value for key, value in sorted(seconds.items())}  # the last run of each
changes = {}
for row in rows([ROOT / "docs/adapt/results.jsonl"]):
    if row["variant"] in VARIANTS:
        change = {name: row["after"]["tasks"][name]["spearman"] - BEFORE[name] for name in BEFORE}
        changes.setdefault(row["variant"], {})[row["seed"]] = change

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
place = np.arange(len(SETS))
for offset, colour, (contender, label) in zip((-0.2, 0.2), (OURS, OTHER), CONTENDERS.items(), strict=True):
    bars = left.bar(place + offset, [seconds[name, contender] for name in SETS], 0.4, color=colour, label=label)
    left.bar_label(bars, fmt="%.1f", fontsize="small")
left.set_xticks(place, SETS)
left.set(title="Seconds for a training step of 512 pairs\n(MiniLM, 2 CPU cores)")
left.legend(frameon=False)
place = np.arange(len(VARIANTS))
for offset, colour, label, names in (
    (-0.2, OURS, "SICK, trained on", ["sick"]),
    (0.2, "#d55e00", "four other STS sets", [name for name in BEFORE if name != "sick"]),
):
    heights = [np.mean([[seed[name] for name in names] for seed in changes[each].values()]) for each in VARIANTS]
    right.bar_label(right.bar(place + offset, heights, 0.4, color=colour, label=label), fmt="%+.1f", fontsize="small")
right.set_xticks(place, VARIANTS.values(), fontsize="small")
right.axhline(0, color="black", linewidth=0.8)
right.set(title="Change after fine-tuning on SICK\n(Spearman x 100)", ylim=(-2.6, 9.5))
right.legend(frameon=False, ncols=2, fontsize="small")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
left.set_ylim(0, 56)
figure.savefig(Path(__file__).with_name("front.png"), dpi=150)
