"""What a sweep leaves for readers: results.jsonl, report.md and plots.

A result is what sweep returns of a run: run, variant, family, seed, point and what its metrics.json holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from raoe_train.artifacts.figures import pictures
from raoe_train.artifacts.markdown import cell, made_with, number, table
from raoe_train.artifacts.writing import write_text
from raoe_train.evaluation.tasks import main_score
from raoe_train.studies import plots

PREFIX = "polarity:"  # of tasks that have two main metrics
LETTERS = {"P": "polarity", "S": "similarity"}
Results = Sequence[Mapping[str, Any]]  # of finished runs

# columns of a sweep that measures: what a run cost, see raoe_train.training.cost_meter
COSTS: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "peak MB": lambda row: row.get("peak_memory_mb"),
    "s / 1,000 steps": lambda row: 1000 * row["train_seconds"] / row["train_steps"] if row.get("train_steps") else None,
}


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
        names = columns(self.tasks, results)
        runs = frame(results, [*names, *(COSTS if self.measured else ())])
        polarity = [task.removeprefix(PREFIX) for task in self.tasks if task.startswith(PREFIX)] if results else []
        about = "Main metrics x 100 (dev: Spearman of cosine), mean ± (sample) standard deviation over seeds."
        lines = [f"# {cell(self.output.resolve().name)}", "", about, *self._variants(runs, names)]
        lines += self._comparisons(runs, names)
        if failed:
            lines += ["", cell("Failed: " + ", ".join(f"{name} (runs/{name}.error.txt)" for name in failed))]
        if draw:
            lines += pictures(lambda: self._draw_curves(runs))
        if polarity:
            lines += best_of_each(polarity, runs)
        if polarity and draw:
            lines += pictures(lambda: self._draw_polarity(polarity, runs))
        made = {json.dumps({"commit": row["commit"], **row["versions"]}) for row in results}
        shown = yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True).rstrip()
        lines += ["", "## Made with", "", *(made_with(json.loads(entry)) for entry in sorted(made))]
        fence = max(("```", *re.findall("`{3,}", shown)), key=len) + "`" * ("```" in shown)
        return [*lines, "", "## Settings", "", f"{fence}yaml", shown, fence]

    def _variants(self, runs: pd.DataFrame, names: Sequence[str]) -> list[str]:
        """The table of encoders before training and of all variants."""
        costs = list(COSTS) if self.measured else []
        rows = []
        for model, found in self.start.items():
            cells = [number(metric(found, name)) for name in names]
            rows.append([cell(f"before: {model}"), "", *cells, *[""] * (2 + len(costs))])
        for variant, of in runs.groupby("variant", sort=False):
            steps, minutes = "/".join(map(str, sorted(set(of["steps"])))), f"{of['seconds'].mean() / 60:.1f}"
            cells, paid = ([mean(of[name]) for name in some] for some in (names, costs))
            rows.append([cell(variant), str(len(of)), *cells, steps, minutes, *paid])
        return table(["variant", "seeds", *map(cell, names), "steps", "minutes", *costs], rows)

    def _comparisons(self, runs: pd.DataFrame, names: Sequence[str]) -> list[str]:
        """Differences between two variants, seed by seed; nothing where less than two seeds have both."""
        from scipy import stats

        rows = []
        for pair in self.compare:
            first, second = (runs[runs["variant"] == name].set_index("seed")[names] for name in pair)
            seeds = first.index.intersection(second.index)
            if len(seeds) > 1:
                found = first.loc[seeds] - second.loc[seeds]
                p = stats.ttest_rel(first.loc[seeds], second.loc[seeds]).pvalue
                cells = [mean(found[name]) for name in names]
                shown = [cell if cell == "-" else f"{cell} (p {at:.3f})" for cell, at in zip(cells, p, strict=True)]
                rows.append([cell(" - ".join(pair)), str(len(seeds)), *shown])
        text = "Differences, x 100, with the p of a paired t-test over seeds:"
        return ["", text, *table(["difference", "seeds", *map(cell, names)], rows)] if rows else []

    def _draw_curves(self, runs: pd.DataFrame) -> list[Path]:
        """The average, or dev of runs without one, along every numeric key of a grid."""
        metrics = runs.reindex(columns=["average", "dev"]).bfill(axis=1)[["average"]]
        averages = {f"before: {model}": found.get("average") for model, found in self.start.items()}
        levels = {name: average for name, average in averages.items() if average is not None}
        made = []
        for key in numeric_keys(runs):
            if lines := curves(runs, key, metrics):
                made.append(self.output / f"{_last(key)}.png")
                plots.plot_lines({"": lines}, key, "main metric x 100, average over tasks (or dev)", made[-1], levels)
        return made

    def _draw_polarity(self, tasks: Sequence[str], runs: pd.DataFrame) -> list[Path]:
        """Of tasks polarity:NAME, P and S along each numeric key of a grid and, of encoders before training, along the
        number k of retrieved sentences (the margins paper's Figure 2); and P against S, with the front."""
        along = {key: {task: curves(runs, key, runs[sides(task)]) for task in tasks} for key in numeric_keys(runs)}
        k = along.setdefault("k", {})
        points, before = {}, {}
        for task in tasks:
            means = runs.groupby("variant", sort=False)[sides(task)].mean().dropna()
            points[task] = {point[0]: point[1:] for point in means.itertuples(name=None)}
            found = {f"before: {model}": of["tasks"].get(PREFIX + task) for model, of in self.start.items()}
            found = {name: of for name, of in found.items() if of}
            before[task] = {name: (of["polarity"], of["similarity"]) for name, of in found.items()}
            k[task] = {
                name: [(int(k), at["polarity"], at["similarity"]) for k, at in of["curve"].items()]
                for name, of in found.items()
                if "curve" in of
            }
        made = [self.output / "polarity-against-similarity.png"]
        plots.plot_tradeoff(points, before, made[0])
        for key, panels in along.items():
            if shown := {task: lines for task, lines in panels.items() if lines}:
                made.append(self.output / f"polarity-{_last(key)}.png")
                plots.plot_lines(shown, key, "P (solid) and S (dotted), x 100", made[-1])
        return made


def _last(key: str) -> str:
    """The last part of a dotted key, as a file may be called."""
    return re.sub(r"[^\w+-]+", "_", key.rpartition(".")[2])


def columns(tasks: Sequence[str], results: Results) -> list[str]:
    """What the table has a column for: dev, main metrics of tasks and their average, P and S of polarity tasks."""
    single = [task for task in tasks if not task.startswith(PREFIX)]
    others = [task.removeprefix(PREFIX) for task in tasks if task.startswith(PREFIX)]
    dev = single or not others or any(metric(row["after"], "dev") is not None for row in results)
    names = ["dev"] if dev else []
    names += [*single, "average"] if single else []
    return names + [column for task in others for column in sides(task)]


def sides(task: str) -> list[str]:
    """The columns of a task polarity:NAME: "P NAME" and "S NAME"."""
    return [f"{letter} {task}" for letter in LETTERS]


def metric(result: Mapping[str, Any], column: str) -> float | None:
    """What an encoder's result, before or after training, has in a column, x100."""
    if column in ("dev", "average"):
        return result.get("spearman" if column == "dev" else "average")
    tasks = result.get("tasks", {})
    letter, _, name = column.partition(" ")
    if letter in LETTERS and name:
        return tasks.get(PREFIX + name, {}).get(LETTERS[letter])
    return main_score(tasks.get(column, {}))


def frame(results: Results, names: Sequence[str]) -> pd.DataFrame:
    """A row a run: variant, family, seed, point, steps, seconds, and in each of the columns `names` what metric says
    of it after training, or what it cost; NaN where it has none."""
    said = ["variant", "family", "seed", "point", "steps", "seconds"]
    rows = [
        [row[name] for name in said]
        + [COSTS[name](row) if name in COSTS else metric(row["after"], name) for name in names]
        for row in results
    ]
    return pd.DataFrame(rows, columns=[*said, *names]).astype(dict.fromkeys(names, float))


def mean(values: pd.Series) -> str:
    """Mean and standard deviation as text; a dash where one is missing."""
    if not len(values) or values.isna().any():
        return "-"
    text = f"{values.mean():.2f}"
    return f"{text} ± {values.std():.2f}" if len(values) > 1 else text


def curves(runs: pd.DataFrame, key: str, metrics: pd.DataFrame) -> dict[str, list[tuple[float, ...]]]:
    """{family of variants: (value of a grid's key, mean of each of `metrics`)} in order. A line of one point is left
    out, and so is a value that is a word, as tau's "auto"."""

    def line(run: Any) -> str:
        return run.family + "".join(f", {k.rpartition('.')[2]} {v}" for k, v in run.point.items() if k != key)

    of = runs[[is_number(point.get(key)) for point in runs["point"]]]
    names = pd.Series([line(run) for run in of.itertuples()], of.index, dtype=object)
    x = pd.Series([point[key] for point in of["point"]], of.index, dtype=float)
    found = metrics.loc[of.index].dropna()
    means = found.groupby([names, x]).mean()
    lines = {name: list(means.loc[name].itertuples(name=None)) for name in names[found.index].unique()}
    return {name: points for name, points in lines.items() if len(points) > 1}


def numeric_keys(runs: pd.DataFrame) -> list[str]:
    """The keys of grids that have numbers."""
    return sorted({key for point in runs["point"] for key, value in point.items() if is_number(value)})


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def best_variants(runs: pd.DataFrame, task: str) -> list[str]:
    """The variant of each family with the highest mean of P and S on a task polarity:NAME."""
    sums = runs[["family", "variant"]].assign(sum=runs[sides(task)].sum(axis=1, skipna=False)).dropna()
    means = sums.groupby(["family", "variant"], sort=False)["sum"].mean()
    return [variant for _, variant in means.groupby(level="family", sort=False).idxmax()]


def best_of_each(tasks: Sequence[str], runs: pd.DataFrame) -> list[str]:
    """The best variant of each family (a loss, of its margins) on tasks polarity:NAME: the margins paper's Figure 3."""
    rows = []
    for task in tasks:
        for variant in best_variants(runs, task):
            both = runs.loc[runs["variant"] == variant, sides(task)]
            rows.append([cell(task), cell(variant), *(mean(both[side]) for side in both), mean(both.mean(axis=1))])
    return ["", "## Best of each", "", "By the mean of P and S.", *table(["task", "variant", "P", "S", "mean"], rows)]
