"""Results of `evaluate` side by side: models x tasks, the papers' numbers, differences with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raoe_train.artifacts.figures import pictures
from raoe_train.artifacts.markdown import cell, made_with, number, table
from raoe_train.artifacts.writing import read_json
from raoe_train.evaluation.classifiers import Classifier
from raoe_train.evaluation.outcomes import Outcomes, read_outcomes
from raoe_train.evaluation.tasks import DEFAULT, main_score, mean_of_all, split_word
from raoe_train.studies.bootstrap import LEVEL, differences, interval
from raoe_train.studies.plots import plot_rows

PUBLISHED = Path(__file__).with_name("published.yaml")
Rows = dict[str, dict[str, float | None]]  # {label: {word of a task, or "average": main metric x100}}


@dataclass
class Result:
    """What one model got."""

    label: str  # its name in the report: the file's, or the directory's
    tasks: dict[str, dict[str, Any]]  # {word: {"kind", "main", metric: value}}
    data: dict[str, str]  # {word: digest of the task's data}, where the result says it
    outcomes: dict[str, Outcomes]  # {word: outcomes}, where they were kept
    made_by: dict[str, Any]  # model, versions and commit


def report_results(
    results: Sequence[Result], output: Path, resamples: int, seed: int
) -> tuple[dict[str, Any], list[str]]:
    """Results side by side, others compared with the first; and OUTPUT/scores.png and differences.png. For the other
    arguments see report.

    Returns:
        ({"scores": {kind: {label: {word: main metric x100, "average"}}}, "published": {kind: {label: the same}},
        "differences": {label: {word: {"difference", "low", "high", "examples"}}}, "made_by": {label: …}}, the lines of
        its page).
    """
    scores = _by_kind(results)
    found: dict[str, Any] = {
        "scores": scores,
        "published": published(scores, results),
        "differences": _differences(results, resamples, seed),
        "made_by": {result.label: result.made_by for result in results},
    }
    return found, [*_page(found, results, resamples), *pictures(lambda: _draw(found, output)), *_makers(results)]


def read_results(named: Mapping[str, str]) -> list[Result]:
    """What `evaluate` or `train` left in each path, {label: path}; ValueError for what is no result, and for different
    data under one task's name."""
    results = [_result(label, Path(path).expanduser()) for label, path in named.items()]
    for word in dict.fromkeys(word for result in results for word in result.tasks):
        of = {result.data[word]: result.label for result in results if word in result.data}
        if len(of) > 1:
            raise ValueError(
                f"task {word!r} is of different data (or settings) in {' and '.join(of.values())}: evaluate them on "
                "the same, or report them apart"
            )
    return results


def _result(label: str, path: Path) -> Result:
    """One result: of `evaluate`, or of `train` after training."""
    file = path / "metrics.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no such result: {file}")
    found = read_json(file)
    after = found.get("after", found)
    tasks: Any = after.get("tasks") if isinstance(after, dict) else None
    model: Any
    data: Any
    settings, made = found.get("settings", {}), found.get("versions", {})
    model, data = (settings.get(name) or {} for name in ("model", "tasks")) if isinstance(settings, dict) else (0, 0)
    whole = tasks and all(isinstance(part, dict) for part in (tasks, made, model, data))
    if not whole or not all(map(_is_task, tasks.values())) or not all(isinstance(of, str) for of in data.values()):
        raise ValueError(
            f"{file} is no result of `raoe-train evaluate --output` (nor metrics.json of a run with evaluation.tasks)"
        )
    made_by = {
        "model": found.get("model") or str(path),
        "files": str(model.get("files") or ""),
        "commit": found.get("commit"),
        "versions": made,
    }
    return Result(label, tasks, data, read_outcomes(file, settings), made_by)


def _is_task(found: Any) -> bool:
    """Whether it is the result of a task: of a kind, with a main metric that is a number or undefined."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name, ""), str) for name in ("kind", "main")):
        return False
    if not all(isinstance(found.get(name, 0), (int, float)) for name in ("pairs", "examples")):
        return False
    main = main_score(found)
    return main is None or (isinstance(main, (int, float)) and abs(main) < 1000)  # x100, and no NaN


def _by_kind(results: Sequence[Result]) -> dict[str, Rows]:
    """{kind: the row of each result on all the kind's words, where it has any of them}."""
    kinds = {word: task.get("kind", DEFAULT) for result in results for word, task in result.tasks.items()}
    found: dict[str, Rows] = {}
    for kind in dict.fromkeys(kinds.values()):
        words = [word for word in kinds if kinds[word] == kind]
        having = [result for result in results if any(word in result.tasks for word in words)]
        found[kind] = {of.label: _row({word: main_score(of.tasks.get(word, {})) for word in words}) for of in having}
    return found


def _row(values: dict[str, float | None]) -> dict[str, float | None]:
    return {**values, "average": mean_of_all(list(values.values()))} if len(values) > 1 else values


def published(metrics: Mapping[str, Rows], results: Sequence[Result]) -> dict[str, Rows]:
    """The papers' rows for the columns of `metrics`, where a task is theirs: the same set with as many pairs, and
    classifier. Averages are of these columns, not of the papers'."""
    known = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    found: dict[str, Rows] = {}
    for kind, rows in metrics.items():
        if kind not in known:
            continue
        tasks, sizes = known[kind]["tasks"], known[kind].get("sizes", {})
        classifier = Classifier(known[kind]["classifier"]).settings() if "classifier" in known[kind] else None
        places: dict[str, int | None] = {}
        for word in (word for word in next(iter(rows.values())) if word != "average"):
            name = split_word(word)[1]
            its = [result.tasks[word] for result in results if word in result.tasks]
            pairs = {task.get("pairs", task.get("examples")) for task in its}
            theirs = name in tasks and (name not in sizes or pairs == {sizes[name]})
            theirs = theirs and all(task.get("classifier") == classifier for task in its)
            places[word] = tasks.index(name) if theirs else None
        if any(place is not None for place in places.values()):
            found[kind] = {
                f"{model} ({paper})": _row({w: None if at is None else values[at] for w, at in places.items()})
                for paper, models in known[kind]["papers"].items()
                for model, values in models.items()
            }
    return found


def _differences(results: Sequence[Result], resamples: int, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """{label: {word: {"difference", "low", "high", "examples"}}} of each result but the first, against the first."""
    first, *others = results
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for other in others:
        rows: dict[str, dict[str, Any]] = {}
        drawn = []
        both = first.outcomes.keys() & other.outcomes.keys() & other.tasks.keys()
        for word in (word for word in first.tasks if word in both):
            a, b = main_score(first.tasks[word]), main_score(other.tasks[word])
            if a is None or b is None:
                continue
            try:
                drawn.append(differences(first.outcomes[word], other.outcomes[word], resamples, seed))
            except ValueError as error:
                raise ValueError(f"task {word!r} of {first.label} and {other.label}: {error}") from None
            rows[word] = _between(b - a, drawn[-1], len(first.outcomes[word].values))
        if len(rows) > 1 and len({first.tasks[word].get("kind") for word in rows}) == 1:
            mean = float(np.mean([row["difference"] for row in rows.values()]))
            rows["average"] = _between(mean, np.mean(drawn, axis=0), sum(row["examples"] for row in rows.values()))
        if rows:
            found[other.label] = rows
    return found


def _between(difference: float, drawn: np.ndarray, examples: int) -> dict[str, Any]:
    low, high = interval(drawn)
    return {"difference": difference, "low": low, "high": high, "examples": examples}


def _page(found: Mapping[str, Any], results: Sequence[Result], resamples: int) -> list[str]:
    lines = ["# Scores", "", "**Best** and <u>second</u> of the models that were evaluated here."]
    tasks = [task for result in results for task in result.tasks.values()]
    for kind, rows in found["scores"].items():
        words = list(next(iter(rows.values())))
        names = dict.fromkeys(task.get("main", "spearman") for task in tasks if task.get("kind", DEFAULT) == kind)
        marked = zip(*(_marks([row[word] for row in rows.values()]) for word in words), strict=True)
        papers = found["published"].get(kind, {})
        shown = [[cell(label), *cells] for label, cells in zip(rows, marked, strict=True)]
        shown += [[f"*{cell(label)}*", *(number(row[word]) for word in words)] for label, row in papers.items()]
        head = ["model", *map(cell, words)]
        lines += ["", f"## {cell(kind)}", "", f"{', '.join(map(cell, names))} x 100", *table(head, shown)]
        if papers:
            lines += ["", "In italics what papers report of their models; averages are of these columns."]
    if others := found["differences"]:
        counts = {word: str(row["examples"]) for rows in reversed(others.values()) for word, row in rows.items()}
        words = list(dict.fromkeys(word for rows in others.values() for word in rows))
        shown = [
            [cell(word), counts[word], *(_difference(rows.get(word)) for rows in others.values())] for word in words
        ]
        lines += [
            "",
            "## Differences",
            "",
            f"From {cell(results[0].label)}, with the {LEVEL} % interval of a paired bootstrap over examples, "
            f"{resamples:,} resamples: how it would vary with other examples of the kind, not with other seeds of "
            "training. Bold where it leaves out 0.",
            *table(["task", "examples", *map(cell, others)], shown),
        ]
    return lines


def _marks(values: Sequence[float | None]) -> list[str]:
    """Numbers as text, the highest bold and the second underlined, as they are shown."""
    shown = [number(value) for value in values]
    if len(shown) < 2:
        return shown
    best, second = [*sorted({text for text in shown if text != "-"}, key=float, reverse=True), None, None][:2]
    return [f"**{text}**" if text == best else f"<u>{text}</u>" if text == second else text for text in shown]


def _difference(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{row['difference']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"
    return f"**{text}**" if row["low"] > 0 or row["high"] < 0 else text


def _draw(found: Mapping[str, Any], output: Path) -> list[Path]:
    made = [output / "scores.png"]
    points = {
        kind: {
            label: {word: None if value is None else (value,) * 3 for word, value in row.items()}
            for label, row in rows.items()
        }
        for kind, rows in found["scores"].items()
    }
    plot_rows(points, "main metric x 100", made[0])
    if found["differences"]:
        made.append(output / "differences.png")
        intervals = {
            label: {word: (row["low"], row["difference"], row["high"]) for word, row in rows.items()}
            for label, rows in found["differences"].items()
        }
        plot_rows({"": intervals}, f"difference from {next(iter(found['made_by']))}, {LEVEL} % interval", made[-1])
    return made


def _makers(results: Sequence[Result]) -> list[str]:
    lines = ["", "## Made by", ""]
    for result in results:
        of = result.made_by
        said = {"model": of["model"], "its files": of["files"][:12], "commit": of["commit"]}
        shown = {name: value for name, value in said.items() if value}
        lines.append(f"- {cell(result.label)}: {made_with({**shown, **of['versions']})}")
    return lines
