"""Print the rows of report.md's table; draw front.png and README.md's bar chart. `python docs/adapt/front.py`."""

import json
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parent
BEFORE = {"sick": 77.15, "stsb": 82.02, "sts12": 72.37, "sts14": 75.60, "sts15": 85.39}
OF_SICK = ("keep-", "rate-")  # variants of SICK that are not called so
UNSEEN = ("sick-200", "sick-noisy", "sick-twice", "sick-labels", "sick-angular")  # other targets, and what is far off
NAMES = {  # of the points: what differs from the recipe
    "sick": "adapt",
    "sick-free": "adapt",
    "sick-mse": "MSE",
    "sick-mse-free": "MSE",
    "sick-cosent": "CoSENT, scale 5",
    "sick-cosent-free": "CoSENT, scale 5",
    "sick-rank": "rank margin",
    "sick-angle": "AnglE",
    "sick-raoe": "RAOE",
    "sick-lora": "LoRA",
    "sick-lora-free": "LoRA",
    "sick-memory": "memory of earlier pairs",
    "sick-early": "six epochs, early stopping",
    "sick-mixed-free": "mixed dev sets",
    "keep-keep-2": "weight 2",
    "keep-keep-4": "weight 4",
    "rate-learning_rate-0.0001": "learning rate 1e-4",
    "rate-learning_rate-0.0004": "learning rate 4e-4",
}
PLACES = {
    "sick-angle": (-4, 8),
    "sick-cosent": (-8, -14),
    "sick-early": (-62, -24),
    "sick-free": (-40, 4),
    "sick-lora": (-32, -4),
    "sick-mse": (-34, -13),
    "sick-raoe": (7, -4),
    "sick-rank": (8, 6),
    "keep-keep-4": (-50, -2),
    "rate-learning_rate-0.0001": (-100, -16),
    "rate-learning_rate-0.0004": (-50, 14),
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

figure, axes = plt.subplots(figsize=(9, 6))
for kept, colour in ((True, "#0072b2"), (False, "#d55e00")):
    its = {variant: point for variant, point in points.items() if variant.endswith("-free") != kept}
    axes.plot(
        *zip(*its.values(), strict=True), "o", color=colour, label="with the regularizer" if kept else "without it"
    )
    for variant, point in its.items():
        axes.annotate(
            NAMES[variant], point, xytext=PLACES.get(variant, (6, 4)), textcoords="offset points", fontsize="small"
        )
front = [point for point in points.values() if not any(a > point[0] and b > point[1] for a, b in points.values())]
axes.plot(*zip(*sorted(front), strict=True), color="#009e73", zorder=0, label="no recipe is better in both")
axes.axhline(0, color="grey", linewidth=0.8)
axes.spines[["top", "right"]].set_visible(False)
axes.set(xlabel="gain on SICK test (Spearman x 100)", ylabel="change elsewhere: mean of STS-B, STS12, 14, 15")
axes.set_title("Variants of adapt, trained on SICK (all-MiniLM-L6-v2)")
axes.margins(x=0.12)
axes.legend(frameon=False, loc="lower left")
figure.tight_layout()
figure.savefig(FOLDER / "front.png", dpi=150)


# README.md: a training step beside sentence-transformers', and the recipe beside plainer losses
contenders = {"by length": ("raoe", "#0072b2"), "sentence-transformers": ("sentence-transformers 6.2", "#999999")}
seconds = {}
for path in sorted((FOLDER.parents[1] / "benchmarks/results").glob("AMD-*.jsonl")):
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        timed = row["op"] == "train_step" and "median_s" in row and row["contender"] in contenders
        if timed and ", 512 pairs, MiniLM" in row["title"]:
            seconds[row["date"], row["title"].split(",")[0], row["contender"]] = row["median_s"]
seconds = {key[1:]: value for key, value in sorted(seconds.items())}  # the last run of each
names = {"adapt": "adapt", "mse": "MSE", "cosent-5": "CoSENT,\nscale 5", "cosent": "CoSENT,\nscale 20"}
proof = map(json.loads, (FOLDER / "proof.jsonl").read_text(encoding="utf-8").splitlines())
tasks = defaultdict(dict)  # of each run and seed, those of the last row without changed settings
for row in proof:
    if row["target"] == "sick" and "mixed" not in row and ":" not in row.get("run", ""):
        tasks[row.get("control") or row.get("run", "adapt").split()[0]][row["seed"]] = row["tasks"]
mean = {run: {name: np.mean([each[name] for each in of.values()]) for name in BEFORE} for run, of in tasks.items()}
print({run: (len(tasks[run]), mean[run]) for run in names})
gains = [{name: mean[run][name] - before for name, before in BEFORE.items()} for run in names]
changes = zip(*((gain.pop("sick"), np.mean([*gain.values()])) for gain in gains), strict=True)  # on SICK, and elsewhere
kinds = ("SICK, trained on", "#0072b2"), ("four other STS sets", "#d55e00")
sets = ("SNLI", "SICK", "STS-B")
times = [[seconds[name, contender] for name in sets] for contender in contenders]

figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.4), layout="constrained")
for axes, labels, groups, looks, form in (
    (panels[0], sets, times, contenders.values(), "%.1f"),
    (panels[1], names.values(), changes, kinds, "%+.2f"),
):
    place = np.arange(len(labels))
    for offset, heights, (label, colour) in zip((-0.2, 0.2), groups, looks, strict=True):
        axes.bar_label(axes.bar(place + offset, heights, 0.4, color=colour, label=label), fmt=form, fontsize="small")
    axes.set_xticks(place, labels, fontsize="small")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend(frameon=False, fontsize="small", loc="upper left", ncols=1 if axes is panels[0] else 2)
    axes.spines[["top", "right"]].set_visible(False)
panels[0].set(title="Seconds for a training step of 512 pairs\n(MiniLM, 2 CPU cores)", ylim=(0, 56))
panels[1].set(title="Change after fine-tuning on SICK\n(Spearman x 100)", ylim=(-13, 11))
figure.savefig(FOLDER.with_name("front.png"), dpi=150)
