"""The report of a sweep: results.jsonl, report.md and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from benchmarks.studies import plots
from benchmarks.studies.jobs import cell, main_score
from benchmarks.studies.markdown import made_with, table

PREFIX = "polarity:"  # of tasks with two main metrics
LETTERS = {"P": "polarity", "S": "similarity"}
Results = Sequence[Mapping[str, Any]]  # rows of finished cells, see sweep

# Extra columns of a study that measures: what training cost.
COSTS: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "peak MB": lambda row: row.get("peak_memory_mb"),
    "s / 1,000 steps": lambda row: 1000 * row["train_seconds"] / row["train_steps"] if row.get("train_steps") else None,
}
ABOUT = (
    "The table shows scores x 100, as mean ± sample standard deviation over seeds. Scores on STS tasks and dev sets",
    "are Spearman correlations between cosine similarity and gold scores. Polarity tasks have two scores: the polarity",
    "score P and the semantic score S.",
)
# Settings of a model that change nothing before training.
NO_DIFFERENCE = ("recipe", "name", "device", "dropout", "lora", "scratch")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".partial.{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def number(value: float | None, digits: int = 2) -> str:
    """A number as text; a dash for None and NaN."""
    return "-" if value is None or value != value else f"{value:.{digits}f}"


@dataclass
class SweepReport:
    """Writes the report of a sweep."""

    output: Path
    tasks: list[str]
    compare: list[Any]  # pairs of variants
    measured: bool  # whether to show COSTS
    settings: dict[str, Any]  # shown at the end

    def write(self, results: Results, failed: Sequence[str], draw: bool = False) -> None:
        """Write results.jsonl and report.md, and the plots if `draw`."""
        write_text(self.output / "results.jsonl", "".join(json.dumps(result) + "\n" for result in results))
        write_text(self.output / "report.md", "\n".join(self._page(results, failed, draw)) + "\n")

    def _page(self, results: Results, failed: Sequence[str], draw: bool) -> list[str]:
        names = columns(self.tasks, results)
        runs = frame(results, [*names, *(COSTS if self.measured else ())])
        polarity = [task.removeprefix(PREFIX) for task in self.tasks if task.startswith(PREFIX)] if results else []
        starts = starting_encoders(results)
        lines = [f"# {cell(self.output.resolve().name)}", "", *ABOUT, *self._variants(runs, names, starts)]
        lines += self._comparisons(runs, names)
        if failed:
            lines += ["", cell("Failed: " + ", ".join(f"{name} (runs/{name}.error.txt)" for name in failed))]
        if polarity:
            lines += best_of_each(polarity, runs)
        if draw:
            made = self._draw_polarity(polarity, runs, starts) if polarity else self._draw_curves(results, runs, starts)
            lines += [line for path in made for line in ("", f"![Scores: {path.stem}]({path.name})")]
        origins = {json.dumps({"commit": row["commit"], **row["versions"]}) for row in results}
        settings = yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True).rstrip()
        lines += ["", "## Made with", "", *(f"- {made_with(json.loads(entry))}" for entry in sorted(origins))]
        return [*lines, "", "## Settings", "", "````yaml", settings, "````"]

    def _variants(self, runs: pd.DataFrame, names: Sequence[str], starts: Mapping[str, Any]) -> list[str]:
        """The table of starting encoders and variants."""
        costs = list(COSTS) if self.measured else []
        rows = []
        for model, result in starts.items():
            scores = [number(metric(result, name)) for name in names]
            rows.append([cell(f"before: {model}"), "", *scores, *[""] * (2 + len(costs))])
        for variant, of in runs.groupby("variant", sort=False):
            steps, minutes = "/".join(map(str, sorted(set(of["steps"])))), f"{of['seconds'].mean() / 60:.1f}"
            scores, cost_texts = ([mean(of[name]) for name in some] for some in (names, costs))
            rows.append([cell(variant), str(len(of)), *scores, steps, minutes, *cost_texts])
        return table(["variant", "seeds", *map(cell, names), "steps", "minutes", *costs], rows)

    def _comparisons(self, runs: pd.DataFrame, names: Sequence[str]) -> list[str]:
        """Differences between two variants, seed by seed, where at least two seeds have both."""
        from scipy import stats

        rows = []
        for pair in self.compare:
            first, second = (runs[runs["variant"] == name].set_index("seed")[names] for name in pair)
            seeds = first.index.intersection(second.index)
            if len(seeds) > 1:
                differences = first.loc[seeds] - second.loc[seeds]
                p = stats.ttest_rel(first.loc[seeds], second.loc[seeds]).pvalue
                means = [mean(differences[name]) for name in names]
                texts = [text if text == "-" else f"{text} (p {at:.3f})" for text, at in zip(means, p, strict=True)]
                rows.append([cell(" - ".join(pair)), str(len(seeds)), *texts])
        text = "Differences between two variants (x 100), with p-values from a paired t-test over seeds:"
        return ["", text, *table(["difference", "seeds", *map(cell, names)], rows)] if rows else []

    def _draw_curves(self, results: Results, runs: pd.DataFrame, starts: Mapping[str, Any]) -> list[Path]:
        """The average (dev without one) along every numeric key of a grid, and before training, of the same tasks."""
        metrics = runs.reindex(columns=["average", "dev"]).bfill(axis=1)[["average"]]
        tasks = [row["after"].get("tasks", {}).keys() for row in results if row["point"]]
        same = {name: result for name, result in starts.items() if all(result["tasks"].keys() == of for of in tasks)}
        levels = {f"before: {name}": result["average"] for name, result in same.items() if result.get("average")}
        paths = []
        for key in numeric_keys(runs):
            if lines := curves(runs, key, metrics):
                paths.append(self.output / f"{_file_name(key)}.png")
                plots.plot_lines({"": lines}, key, ["average of the tasks, or dev (x 100)"], paths[-1], levels)
        return paths

    def _draw_polarity(self, tasks: Sequence[str], runs: pd.DataFrame, starts: Mapping[str, Any]) -> list[Path]:
        """P against S with the Pareto front; P and S along each numeric key (the margins paper's Figure 3)."""
        along = {key: {task: curves(runs, key, runs[sides(task)]) for task in tasks} for key in numeric_keys(runs)}
        points: dict[str, Any] = {}
        before: dict[str, Any] = {}
        for task in tasks:
            means = runs.groupby("variant", sort=False)[sides(task)].mean().dropna()
            points[task] = {point[0]: point[1:] for point in means.itertuples(name=None)}
            before_runs = {f"before: {model}": result["tasks"].get(PREFIX + task) for model, result in starts.items()}
            before_runs = {name: of for name, of in before_runs.items() if of}
            before[task] = {name: (of["polarity"], of["similarity"]) for name, of in before_runs.items()}
        paths = [self.output / "polarity-against-similarity.png"]
        plots.plot_tradeoff(points, before, paths[0])
        for key, panels in along.items():
            if present := {task: lines for task, lines in panels.items() if lines}:
                paths.append(self.output / f"polarity-{_file_name(key)}.png")
                plots.plot_lines(present, key, plots.POLARITY, paths[-1])
        return paths


def _file_name(key: str) -> str:
    return re.sub(r"[^\w+-]+", "_", key.rpartition(".")[2])


def starting_encoders(results: Results) -> dict[str, dict[str, Any]]:
    """{starting encoder and its settings: its result before training}."""
    encoders: dict[str, dict[str, Any]] = {}
    labels: dict[str, str] = {}
    for row in results:
        if not row["start"] or not row["before"].get("tasks"):
            continue
        start = row["start"]
        name = str(start.get("name") or start["recipe"])
        settings_of = {key: value for key, value in start.items() if key not in NO_DIFFERENCE}
        settings = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings_of.items())
        key = json.dumps([name, start["recipe"], settings_of])
        if key not in labels:
            short = f"{Path(name).name} ({settings})" if settings else Path(name).name
            labels[key] = short if short not in encoders else short.replace(Path(name).name, name, 1)
        result = encoders.setdefault(labels[key], {**row["before"], "tasks": {}})
        result["tasks"] = {**result["tasks"], **row["before"]["tasks"]}
    return encoders


def columns(tasks: Sequence[str], results: Results) -> list[str]:
    """Names of the table's columns: dev, the main metrics of tasks, their average, and P and S of polarity tasks."""
    single = [task for task in tasks if not task.startswith(PREFIX)]
    polarity = [task.removeprefix(PREFIX) for task in tasks if task.startswith(PREFIX)]
    dev = single or not polarity or any(metric(row["after"], "dev") is not None for row in results)
    names = ["dev"] if dev else []
    names += [*single, "average"] if single else []
    return names + [column for task in polarity for column in sides(task)]


def sides(task: str) -> list[str]:
    """The columns of a task polarity:NAME: "P NAME" and "S NAME"."""
    return [f"{letter} {task}" for letter in LETTERS]


def metric(result: Mapping[str, Any], column: str) -> float | None:
    """The value x 100 that an encoder's result, before or after training, has in a column."""
    if column in ("dev", "average"):
        return result.get("spearman" if column == "dev" else "average")
    tasks = result.get("tasks", {})
    letter, _, name = column.partition(" ")
    if letter in LETTERS and name:
        return tasks.get(PREFIX + name, {}).get(LETTERS[letter])
    return main_score(tasks.get(column, {}))


def frame(results: Results, names: Sequence[str]) -> pd.DataFrame:
    """One row a cell: variant, family, seed, point, steps, seconds, and the columns `names`; NaN where undefined."""
    about = ["variant", "family", "seed", "point", "steps", "seconds"]
    rows = [
        [row[name] for name in about]
        + [COSTS[name](row) if name in COSTS else metric(row["after"], name) for name in names]
        for row in results
    ]
    return pd.DataFrame(rows, columns=[*about, *names]).astype(dict.fromkeys(names, float))


def mean(values: pd.Series) -> str:
    """Mean and standard deviation as text; a dash where one is missing."""
    if not len(values) or values.isna().any():
        return "-"
    text = f"{values.mean():.2f}"
    return f"{text} ± {values.std():.2f}" if len(values) > 1 else text


def curves(runs: pd.DataFrame, key: str, metrics: pd.DataFrame) -> dict[str, list[tuple[float, ...]]]:
    """{family: [(value of a grid's key, mean of each of `metrics`), …]} in order of the values. Values that are words
    are left out, and so are lines of one point."""

    def line(run: Any) -> str:
        return run.family + "".join(f", {k.rpartition('.')[2]} {v}" for k, v in run.point.items() if k != key)

    of = runs[[is_number(point.get(key)) for point in runs["point"]]]
    names = pd.Series([line(run) for run in of.itertuples()], of.index, dtype=object)
    x = pd.Series([point[key] for point in of["point"]], of.index, dtype=float)
    values = metrics.loc[of.index].dropna()
    means = values.groupby([names, x]).mean()
    lines = {name: list(means.loc[name].itertuples(name=None)) for name in names[values.index].unique()}
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
    """A table of the best variant of each family on each task polarity:NAME (the margins paper's Figure 3)."""
    rows = []
    for task in tasks:
        for variant in best_variants(runs, task):
            both = runs.loc[runs["variant"] == variant, sides(task)]
            rows.append([cell(task), cell(variant), *(mean(both[side]) for side in both), mean(both.mean(axis=1))])
    about = "For each family of variants, the table shows the variant with the highest mean of P and S."
    return ["", "## Best of each", "", about, *table(["task", "variant", "P", "S", "mean"], rows)]
