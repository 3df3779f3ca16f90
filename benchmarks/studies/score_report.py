"""Results of `raoe-train evaluate` side by side: scores, the papers' numbers, and differences with intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.studies.jobs import (
    LEVEL,
    Outcomes,
    cell,
    differences,
    interval,
    main_score,
    read_outcomes,
    split_word,
)
from benchmarks.studies.markdown import made_with, table
from benchmarks.studies.plots import plot_rows
from benchmarks.studies.sweep_report import number

PUBLISHED = Path(__file__).with_name("published.yaml")
Rows = dict[str, dict[str, "float | None"]]  # {label: {task or "average": main metric x 100}}


@dataclass
class Result:
    """What `evaluate` or `train` wrote about one model."""

    label: str
    tasks: dict[str, dict[str, Any]]  # {task: {"kind", "main", metric: value}}
    data: dict[str, str]  # {task: digest of its data}
    outcomes: dict[str, Outcomes]  # {task: values of its examples}
    made_by: dict[str, Any]  # model, its files, commit, and versions


def report_scores(
    files: Mapping[str, str], output: Path, resamples: int, seed: int
) -> tuple[dict[str, Any], list[str]]:
    """Compare results, {label: path}, with the first of them, and draw OUTPUT/scores.png.

    Returns:
        ({"scores": {kind: {label: {task: main metric x 100, "average"}}}, "published": {kind: {label: {task: …}}},
        "differences": {label: {task: {"difference", "low", "high", "examples"}}}, "made_by": {label: …}}, the lines
        of the report's page).

    Raises:
        FileNotFoundError: a path without a result.
        ValueError: a file that is no result, or results of different data for one task.
    """
    results = read_results(files)
    scores = _by_kind(results)
    summary: dict[str, Any] = {
        "scores": scores,
        "published": published(scores, results),
        "differences": _differences(results, resamples, seed),
        "made_by": {result.label: result.made_by for result in results},
    }
    panels: dict[str, Any] = {
        f"{kind}: main metric x 100": {
            label: {task: None if value is None else (value,) * 3 for task, value in row.items()}
            for label, row in rows.items()
        }
        for kind, rows in scores.items()
    }
    if summary["differences"]:
        panels[f"difference from {results[0].label}, {LEVEL} % interval"] = {
            label: {task: (row["low"], row["difference"], row["high"]) for task, row in rows.items()}
            for label, rows in summary["differences"].items()
        }
    plot_rows(panels, output / "scores.png")
    return summary, [*_page(summary, results, resamples), "", "![scores](scores.png)", *_makers(results)]


def read_results(files: Mapping[str, str]) -> list[Result]:
    results = [_result(label, Path(path).expanduser()) for label, path in files.items()]
    for task in dict.fromkeys(task for result in results for task in result.tasks):
        of = {result.data[task]: result.label for result in results if task in result.data}
        if len(of) > 1:
            raise ValueError(
                f"task {task!r} has different data or settings in {' and '.join(of.values())}: evaluate the models on "
                "the same data, or report them separately"
            )
    return results


def _result(label: str, path: Path) -> Result:
    file = path / "metrics.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no such result: {file}")
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))
        tasks = metrics.get("after", metrics)["tasks"]  # `train` has the metrics after training there
        settings = metrics.get("settings") or {}
        made_by = {
            "model": metrics.get("model") or str(path),
            "options": {"truncate_dim": settings["truncate_dim"]} if "truncate_dim" in settings else {},
            "files": str((settings.get("model") or {}).get("name") or ""),
            "versions": dict(metrics.get("versions") or {}),
        }
        data = {word: str(content) for word, content in [*settings.get("tasks", []), *settings.get("suite", [])]}
        valid = bool(tasks) and all(
            isinstance(main_score(task), (float, int, type(None))) and isinstance(kind_of(word, task), str)
            for word, task in tasks.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(f"{file} is not a result of raoe-train evaluate, nor metrics.json of a run with tasks")
    return Result(label, tasks, data, read_outcomes(file, settings), made_by)


def kind_of(task: str, result: Mapping[str, Any]) -> str:
    return result.get("kind", split_word(task)[0])


def _by_kind(results: Sequence[Result]) -> dict[str, Rows]:
    """{kind: the row of each result that has tasks of this kind}."""
    kinds = {task: kind_of(task, of) for result in results for task, of in result.tasks.items()}
    by_kind: dict[str, Rows] = {}
    for kind in dict.fromkeys(kinds.values()):
        tasks = [task for task in kinds if kinds[task] == kind]
        owners = [result for result in results if result.tasks.keys() & tasks]
        by_kind[kind] = {of.label: _row({task: main_score(of.tasks.get(task, {})) for task in tasks}) for of in owners}
    return by_kind


def _row(values: dict[str, float | None]) -> dict[str, float | None]:
    """Scores and, for several tasks, their average, which is None if a score is."""
    scores = [value for value in values.values() if value is not None]
    average = float(np.mean(scores)) if len(scores) == len(values) else None
    return {**values, "average": average} if len(values) > 1 else values


def published(scores: Mapping[str, Rows], results: Sequence[Result]) -> dict[str, Rows]:
    """The papers' rows for those columns of `scores` that have the paper's set, number of pairs and classifier.
    Averages are over these columns, not the papers' averages."""
    papers = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    rows: dict[str, Rows] = {}
    for kind in (kind for kind in scores if kind in papers):
        tasks, sizes, classifier = (papers[kind].get(key) for key in ("tasks", "sizes", "classifier"))
        places: dict[str, int | None] = {}
        for task in (task for task in next(iter(scores[kind].values())) if task != "average"):
            name = split_word(task)[1]
            task_results = [result.tasks[task] for result in results if task in result.tasks]
            same = name in tasks and all((of.get("classifier") or None) == classifier for of in task_results)
            if name in (sizes or {}):
                same = same and {of.get("pairs", of.get("examples")) for of in task_results} == {sizes[name]}
            places[task] = tasks.index(name) if same else None
        if any(place is not None for place in places.values()):
            rows[kind] = {
                f"{model} ({paper})": _row({w: None if at is None else values[at] for w, at in places.items()})
                for paper, models in papers[kind]["papers"].items()
                for model, values in models.items()
            }
    return rows


def _differences(results: Sequence[Result], resamples: int, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """{label: {task: difference from the first result}} of the other results; an average if all tasks have one kind."""
    first, *rest = results
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for other in rest:
        rows: dict[str, dict[str, Any]] = {}
        samples = []
        for task in first.tasks:
            a, b = main_score(first.tasks[task]), main_score(other.tasks.get(task, {}))
            if a is None or b is None or not (task in first.outcomes and task in other.outcomes):
                continue
            try:
                samples.append(differences(first.outcomes[task], other.outcomes[task], resamples, seed))
            except ValueError as error:
                raise ValueError(f"task {task!r} of {first.label} and {other.label}: {error}") from None
            rows[task] = _between(b - a, samples[-1], len(first.outcomes[task].values))
        if len(rows) > 1 and len({kind_of(task, first.tasks[task]) for task in rows}) == 1:
            mean = float(np.mean([row["difference"] for row in rows.values()]))
            rows["average"] = _between(mean, np.mean(samples, axis=0), sum(row["examples"] for row in rows.values()))
        if rows:
            result[other.label] = rows
    return result


def _between(difference: float, samples: np.ndarray, examples: int) -> dict[str, Any]:
    low, high = interval(samples)
    return {"difference": difference, "low": low, "high": high, "examples": examples}


def _page(summary: Mapping[str, Any], results: Sequence[Result], resamples: int) -> list[str]:
    lines = ["# Scores", "", "**Best** and <u>second</u> of the models that were evaluated here."]
    for kind, rows in summary["scores"].items():
        columns = list(next(iter(rows.values())))
        metrics = {r.tasks[c].get("main", "spearman") for r in results for c in columns if c in r.tasks}
        marked = zip(*(_marks([row[column] for row in rows.values()]) for column in columns), strict=True)
        papers = summary["published"].get(kind, {})
        body = [[cell(label), *cells] for label, cells in zip(rows, marked, strict=True)]
        body += [[f"*{cell(label)}*", *(number(row[column]) for column in columns)] for label, row in papers.items()]
        head = ["model", *map(cell, columns)]
        lines += ["", f"## {cell(kind)}", "", f"{', '.join(map(cell, sorted(metrics)))} x 100", *table(head, body)]
        if papers:
            lines += ["", "Italics: the papers' numbers for their models, averaged over these columns."]
    if differences := summary["differences"]:
        counts = {task: str(row["examples"]) for rows in reversed(differences.values()) for task, row in rows.items()}
        tasks = list(dict.fromkeys(task for rows in differences.values() for task in rows))
        body = [
            [cell(task), counts[task], *(_difference(of.get(task)) for of in differences.values())] for task in tasks
        ]
        lines += [
            "",
            "## Differences",
            "",
            f"From {cell(results[0].label)}, with the {LEVEL} % interval of a paired bootstrap over examples "
            f"({resamples:,} resamples): variation over other examples, not over seeds of training. Bold where the "
            "interval excludes 0.",
            *table(["task", "examples", *map(cell, differences)], body),
        ]
    return lines


def _marks(values: Sequence[float | None]) -> list[str]:
    """Numbers as text, the highest bold and the second underlined."""
    texts = [number(value) for value in values]
    if len(texts) < 2:
        return texts
    best, second = [*sorted({text for text in texts if text != "-"}, key=float, reverse=True), None, None][:2]
    return [f"**{text}**" if text == best else f"<u>{text}</u>" if text == second else text for text in texts]


def _difference(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{row['difference']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"
    return f"**{text}**" if row["low"] > 0 or row["high"] < 0 else text


def _makers(results: Sequence[Result]) -> list[str]:
    lines = ["", "## Made by", ""]
    for result in results:
        of = result.made_by
        about = {"model": of["model"], "its files": of["files"][:12]}
        facts = {name: value for name, value in {**about, **of["options"]}.items() if value}
        lines.append(f"- {cell(result.label)}: {made_with({**facts, **of['versions']})}")
    return lines
