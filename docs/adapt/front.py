"""Of results.jsonl: the rows of adapt.md's table, printed, and front.png. `python docs/adapt/front.py`."""

import json
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parent
BEFORE = {"sick": 77.15, "stsb": 82.02, "sts12": 72.37, "sts14": 75.60, "sts15": 85.39}
OF_SICK = ("keep-", "rate-")  # variants of SICK that are not called so
UNSEEN = ("sick-200", "sick-noisy", "sick-twice", "sick-labels", "sick-angular")  # other targets, and what is far off
PLACES = {
    "sick-cosent": (-4, -13),
    "sick-lora": (-26, -8),
    "sick-mse": (6, -10),
    "keep-keep-4": (-42, -4),
    "sick-rank": (6, 4),
    "sick-raoe": (-10, -14),
    "sick-free": (-98, 4),
    "rate-learning_rate-0.0001": (-66, -4),
    "rate-learning_rate-0.0004": (-40, 8),
}

runs = defaultdict(dict)
for line in (FOLDER / "results.jsonl").read_text(encoding="utf-8").splitlines():
    row = json.loads(line)
    runs[row["variant"]][row["seed"]] = row  # of what was run again the last


def shown(values):
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


points = {}
for variant, by_seed in runs.items():
    rows = [*by_seed.values()]
    target = "sick" if variant.startswith(OF_SICK) else variant.split("-")[0]
    after = {name: [row["after"]["tasks"][name]["spearman"] for row in rows] for name in BEFORE}
    others = [name for name in BEFORE if name != target]
    elsewhere = [np.mean([after[name][run] - BEFORE[name] for name in others]) for run in range(len(rows))]
    dev = f"dev {rows[0]['before']['spearman']:.2f} {shown([row['after']['spearman'] for row in rows])}"
    print(f"| {variant} | {len(rows)} | {dev} | {' | '.join(map(shown, [elsewhere, *after.values()]))} |")
    if target == "sick" and not variant.startswith(UNSEEN):
        points[variant] = np.mean(after["sick"]) - BEFORE["sick"], np.mean(elsewhere)

figure, axes = plt.subplots(figsize=(7.5, 5.2))
for kept, colour in ((True, "#0072b2"), (False, "#d55e00")):
    its = {variant: point for variant, point in points.items() if variant.endswith("-free") != kept}
    axes.plot(*zip(*its.values(), strict=True), "o", color=colour, label="with training.keep" if kept else "without")
    for variant, point in its.items():
        name = variant.removesuffix("-free").removeprefix("sick-").removeprefix("keep-").removeprefix("rate-learning_")
        name = {"sick": "adapt" if kept else "adapt without it"}.get(name, name)
        axes.annotate(name, point, xytext=PLACES.get(variant, (5, 4)), textcoords="offset points", fontsize="small")
front = [point for point in points.values() if not any(a > point[0] and b > point[1] for a, b in points.values())]
axes.plot(*zip(*sorted(front), strict=True), color="#009e73", zorder=0, label="the front")
axes.axhline(0, color="black", linestyle=":", linewidth=0.8)
axes.set(xlabel="gain on SICK test (Spearman x 100)", ylabel="change elsewhere: mean of STS-B, STS12, 14, 15")
axes.margins(x=0.12)
axes.legend(frameon=False, loc="lower left")
figure.tight_layout()
figure.savefig(FOLDER / "front.png", dpi=150)
