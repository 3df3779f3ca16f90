"""What a sweep leaves for readers: results.jsonl, report.md and plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raoe_train.artifacts.figures import pictures
from raoe_train.artifacts.writing import write_text
from raoe_train.studies import plots
from raoe_train.studies.markdown import made_with, table
from raoe_train.studies.sweep_metrics import (
    COSTS,
    PREFIX,
    best_variants,
    by_variant,
    columns,
    curves,
    mean,
    metric,
    numeric_keys,
    polarity_columns,
    polarity_means,
)

Results = list[dict[str, Any]]  # of finished runs, see sweep_metrics


@dataclass
class SweepReport:
    """A sweep's report."""

    output: Path  # the sweep's directory
    tasks: list[str]
    compare: list[Any]  # pairs of variants
    measured: bool  # whether there are columns for costs
    settings: dict[str, Any]  # shown at the end
    start: dict[str, Any]  # {encoder: its result before training}

    def write(self, results: Results, failed: Sequence[str], draw: bool = False) -> None:
        """Write results.jsonl, a run a line, and report.md, with names of runs that failed and, if `draw`, plots."""
        write_text(self.output / "results.jsonl", "".join(json.dumps(result) + "\n" for result in results))
        write_text(self.output / "report.md", "\n".join(self._page(results, failed, draw)) + "\n")

    def _page(self, results: Results, failed: Sequence[str], draw: bool) -> list[str]:
        lines = [
            f"# {self.output.resolve().name}",
            "",
            f"{what_numbers_are(self.tasks, results)}, mean ± (sample) standard deviation over seeds.",
            *self._variants(results),
            *self._comparisons(results),
        ]
        if failed:
            lines += ["", "Failed: " + ", ".join(f"{name} (runs/{name}/error.txt)" for name in failed)]
        polarity = [task for task in self.tasks if task.startswith(PREFIX)]
        if draw:
            names = [name for name in ("average", "dev") if name in columns(self.tasks, results)]
            lines += pictures(lambda: plot_along_grids(self.output, names, results, self.start))
        lines += best_of_each(polarity, results)
        if draw:
            lines += pictures(lambda: plot_of_polarity(self.output, polarity, results, self.start))
        made = {json.dumps({"commit": row["commit"], **row["versions"]}) for row in results}
        shown = yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True).rstrip()
        lines += ["", "## Made with", "", *(made_with(json.loads(entry)) for entry in sorted(made))]
        return [*lines, "", "## Settings", "", "```yaml", shown, "```"]

    def _variants(self, results: Results) -> list[str]:
        """The table of encoders before training and of all variants."""
        names = columns(self.tasks, results)
        costs = COSTS if self.measured else {}
        rows = []
        for model, found in self.start.items():
            cells = [mean([metric(found, name)]) for name in names]
            rows.append([f"before: {Path(model).name}", "", *cells, *[""] * (2 + len(costs))])
        for variant, runs in by_variant(results).items():
            cells = [mean([metric(run["after"], name) for run in runs]) for name in names]
            steps = "/".join(str(steps) for steps in sorted({run["steps"] for run in runs}))
            minutes = f"{statistics.fmean(run['seconds'] for run in runs) / 60:.1f}"
            paid = [mean([cost(run) for run in runs]) for cost in costs.values()]
            rows.append([variant, str(len(runs)), *cells, steps, minutes, *paid])
        return table(["variant", "seeds", *names, "steps", "minutes", *costs], rows)

    def _comparisons(self, results: Results) -> list[str]:
        """Differences between two variants, seed by seed; nothing where less than two seeds have both."""
        from scipy import stats

        found, names, rows = by_variant(results), columns(self.tasks, results), []
        for first, second in self.compare:
            a, b = ({run["seed"]: run["after"] for run in found.get(name, [])} for name in (first, second))
            seeds = sorted(a.keys() & b.keys())
            if len(seeds) < 2:
                continue
            cells = []
            for name in names:
                sides = [[metric(side[seed], name) for seed in seeds] for side in (a, b)]
                if any(value is None for side in sides for value in side):
                    cells.append("-")
                    continue
                differences = [x - y for x, y in zip(*sides, strict=True)]
                cells.append(f"{mean(differences)} (p {stats.ttest_rel(*sides).pvalue:.3f})")
            rows.append([f"{first} - {second}", str(len(seeds)), *cells])
        text = "Differences, x 100, with the p of a paired t-test over seeds:"
        return ["", text, *table(["difference", "seeds", *names], rows)] if rows else []


def what_numbers_are(tasks: Sequence[str], results: Results) -> str:
    """What the table's numbers are: "Spearman x 100 of cosine", and the metrics of tasks of other kinds."""
    others: dict[str, list[str]] = {}
    for task, found in (results[0]["after"].get("tasks", {}) if results else {}).items():
        if found.get("main", "spearman") not in ("spearman", "polarity"):
            others.setdefault(found["main"], []).append(task)
    named = [f"{main} x 100 of {', '.join(tasks)}" for main, tasks in others.items()]
    if polarity := [task for task in tasks if task.startswith(PREFIX)]:
        named.append("polarity score P and semantic score S x 100")
    return "; ".join([*(["Spearman x 100 of cosine"] if len(polarity) < len(tasks) or not tasks else []), *named])


def best_of_each(tasks: Sequence[str], results: Results) -> list[str]:
    """The best variant of each family (a loss, of its margins) on tasks polarity:NAME: the margins paper's Figure 3."""
    rows = []
    for task in tasks:
        for variant, runs in best_variants(results, task).items():
            both: list[Any] = [[metric(run["after"], column) for column in polarity_columns(task)] for run in runs]
            cells = [*map(mean, zip(*both, strict=True)), mean([(p + s) / 2 for p, s in both])]
            rows.append([task.removeprefix(PREFIX), variant, *cells])
    if not tasks or not results:
        return []
    return ["", "## Best of each", "", "By the mean of P and S.", *table(["task", "variant", "P", "S", "mean"], rows)]


def plot_along_grids(output: Path, names: Sequence[str], results: Results, start: dict[str, Any]) -> list[Path]:
    """A plot for every numeric key of a grid: the metric, that of the first of `names` that a run has, against the
    key's value."""
    averages = {f"before: {Path(model).name}": found.get("average") for model, found in start.items()}
    before = {name: average for name, average in averages.items() if average is not None}
    made = []
    for key in numeric_keys(results):
        if lines := curves(results, key, names):
            made.append(output / f"{key.rpartition('.')[2]}.png")
            plots.plot_curves(lines, before, key, made[-1])
    return made


def plot_of_polarity(output: Path, tasks: Sequence[str], results: Results, start: dict[str, Any]) -> list[Path]:
    """Plots of tasks polarity:NAME in `output`; none where there are no such tasks.

    - P and S along each numeric key of a grid.
    - P against S, with the front: variants that none is better than in both.
    - P and S along the number of retrieved sentences, of the encoders before training: the paper's Figure 2.
    """
    if not tasks or not results:
        return []
    made: list[Path] = []
    for key in numeric_keys(results):
        panels = {}
        for task in tasks:
            of_p, of_s = (curves(results, key, [column]) for column in polarity_columns(task))
            panels[task] = {
                line: [(x, value, of_s[line][x]) for x, value in points.items()] for line, points in of_p.items()
            }
        if any(panels.values()):
            made.append(output / f"polarity-{key.rpartition('.')[2]}.png")
            plots.plot_polarity(_titled(panels), key, made[-1])
    points, before, along = {}, {}, {}
    for task in tasks:
        means = {variant: polarity_means(runs, task) for variant, runs in by_variant(results).items()}
        points[task] = {variant: (p, s) for variant, (p, s) in means.items() if p is not None and s is not None}
        found = {Path(model).name: of["tasks"][task] for model, of in start.items() if task in of["tasks"]}
        before[task] = {f"before: {name}": (of["polarity"], of["similarity"]) for name, of in found.items()}
        along[task] = {
            name: [(int(k), at["polarity"], at["similarity"]) for k, at in of["curve"].items()]
            for name, of in found.items()
            if "curve" in of
        }
    made.append(output / "polarity-against-similarity.png")
    plots.plot_tradeoff(_titled(points), _titled(before), made[-1])
    if any(along.values()):
        made.append(output / "polarity-k.png")
        plots.plot_polarity(_titled(along), "retrieved sentences k", made[-1])
    return made


def _titled(panels: dict[str, Any]) -> dict[str, Any]:
    return {task.removeprefix(PREFIX): content for task, content in panels.items() if content}
