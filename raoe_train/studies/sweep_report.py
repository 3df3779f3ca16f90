"""What a sweep leaves for readers: results.jsonl, report.md and a plot for each numeric key of a grid."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from raoe_train.artifacts.figures import pictures
from raoe_train.artifacts.writing import write_text
from raoe_train.config import SweepConfig
from raoe_train.old_recipe import to_dict
from raoe_train.studies.markdown import table_head, table_row
from raoe_train.studies.plots import plot_curves
from raoe_train.studies.polarity_report import best_of_each, polarity_plots
from raoe_train.studies.sweep_scores import COSTS, PREFIX, by_variant, columns, curves, mean, numeric_keys, score


def write_report(
    output: Path, config: SweepConfig, results: list[dict[str, Any]], start: dict[str, Any], failed: list[str]
) -> None:
    """Write results.jsonl (one finished run a line), report.md and plots.

    Args:
        output: the sweep's directory.
        config: the sweep, for the report's head.
        results: finished runs: run, variant, family, seed, point and what metrics.json holds.
        start: {encoder: scores} before training.
        failed: names of runs that failed.
    """
    write_text(output / "results.jsonl", "".join(json.dumps(result) + "\n" for result in results))
    write_text(output / "report.md", _report(output, config, results, start, failed))


def _report(
    output: Path, config: SweepConfig, results: list[dict[str, Any]], start: dict[str, Any], failed: list[str]
) -> str:
    names = columns(config.tasks, results)
    costs = COSTS if config.measure else {}
    lines = [
        f"# {output.resolve().name}",
        "",
        f"{_metrics(config.tasks, results)}, mean ± (sample) standard deviation over seeds.",
        "",
        *table_head(["variant", "seeds", *names, "steps", "minutes", *costs]),
    ]
    for model, scores in start.items():
        cells = [mean([score({"after": scores}, name)]) for name in names]
        lines.append(table_row([f"before: {Path(model).name}", "", *cells, "", "", *[""] * len(costs)]))
    for variant, rows in by_variant(results).items():
        cells = [mean([score(row, name) for row in rows]) for name in names]
        minutes = statistics.fmean(row["seconds"] for row in rows) / 60
        steps = "/".join(str(steps) for steps in sorted({row["steps"] for row in rows}))
        paid = [mean([cost(row) for row in rows]) for cost in costs.values()]
        lines.append(table_row([variant, str(len(rows)), *cells, steps, f"{minutes:.1f}", *paid]))
    lines += _comparisons(config.compare, by_variant(results), names)
    if failed:
        lines += ["", "Failed: " + ", ".join(f"{name} (runs/{name}/error.txt)" for name in failed)]
    polarity = [task for task in config.tasks if task.startswith(PREFIX)]
    lines += pictures(lambda: _plots(output, results, start, [name for name in ("average", "dev") if name in names]))
    lines += best_of_each(polarity, results)
    lines += pictures(lambda: polarity_plots(output, polarity, results, start))
    made = {json.dumps({"commit": row["commit"], **row["versions"]}) for row in results}
    lines += ["", "## Made with", ""]
    lines += [", ".join(f"{name} {version}" for name, version in json.loads(entry).items()) for entry in sorted(made)]
    settings = {key: value for key, value in to_dict(config).items() if key not in ("output", "overwrite", "only")}
    lines += [
        "",
        "## Settings",
        "",
        "```yaml",
        yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _metrics(tasks: list[str], results: list[dict[str, Any]]) -> str:
    """What the table's numbers are: "Spearman x 100 of cosine", and the metrics of tasks of other kinds."""
    others: dict[str, list[str]] = {}
    for task, found in (results[0]["after"].get("tasks", {}) if results else {}).items():
        if found.get("main", "spearman") not in ("spearman", "polarity"):
            others.setdefault(found["main"], []).append(task)
    named = [f"{metric} x 100 of {', '.join(tasks)}" for metric, tasks in others.items()]
    if polarity := [task for task in tasks if task.startswith(PREFIX)]:
        named.append("polarity score P and semantic score S x 100")
    return "; ".join([*(["Spearman x 100 of cosine"] if len(polarity) < len(tasks) or not tasks else []), *named])


def _comparisons(pairs: list[Any], found: Mapping[str, list[dict[str, Any]]], names: list[str]) -> list[str]:
    """Rows of differences between two variants, seed by seed; nothing where less than two seeds have both."""
    from scipy import stats

    rows = []
    for first, second in pairs:
        a, b = ({row["seed"]: row for row in found.get(name, [])} for name in (first, second))
        seeds = sorted(a.keys() & b.keys())
        if len(seeds) < 2:
            continue
        cells = []
        for name in names:
            scores = [[score(side[seed], name) for seed in seeds] for side in (a, b)]
            if any(score is None for side in scores for score in side):
                cells.append("-")
                continue
            differences = [x - y for x, y in zip(*scores, strict=True)]
            p = stats.ttest_rel(*scores).pvalue
            cells.append(f"{mean(list(differences))} (p {p:.3f})")
        rows.append(table_row([f"{first} - {second}", str(len(seeds)), *cells]))
    if not rows:
        return []
    text = "Differences, x 100, with the p of a paired t-test over seeds:"
    return ["", text, "", *table_head(["difference", "seeds", *names]), *rows]


def _plots(output: Path, results: list[dict[str, Any]], start: dict[str, Any], names: list[str]) -> list[Path]:
    """For every numeric key of a grid: score against its value, a line for each family of variants; the score that of
    the first of `names` that a run has."""
    before = {
        f"before: {Path(model).name}": scores["average"]
        for model, scores in start.items()
        if scores.get("average") is not None
    }
    made = []
    for key in numeric_keys(results):
        found = curves(results, key, names)
        lines = {family: sorted(points.items()) for family, points in found.items() if len(points) > 1}
        if lines:
            made.append(output / f"{key.rpartition('.')[2]}.png")
            plot_curves(lines, before, key, made[-1])
    return made
