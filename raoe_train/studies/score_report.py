"""Results of `evaluate` side by side: models x tasks, the papers' numbers, differences with their intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from raoe_train.artifacts.figures import pictures
from raoe_train.artifacts.provenance import digest, earlier_result, versions
from raoe_train.artifacts.writing import write_json, write_text
from raoe_train.evaluation.outcomes import Outcomes, read_outcomes
from raoe_train.evaluation.tasks import DEFAULT, main_score, mean_of_all, split_word
from raoe_train.studies.bootstrap import LEVEL, bootstrap, interval
from raoe_train.studies.markdown import cell, table_head, table_row
from raoe_train.studies.plots import plot_differences, plot_main_metrics

if TYPE_CHECKING:
    from raoe_train.config import ReportConfig

PUBLISHED = Path(__file__).with_name("published.yaml")


@dataclass
class Result:
    """What one model got.

    Attributes:
        label: its name in the report: the file's, or the directory's.
        tasks: {word: {"kind", "main", metric: value}}.
        data: {word: digest of the task's data}, where the result says it.
        examples: {word: examples}, where they were kept.
        made_by: model, versions and commit.
    """

    label: str
    tasks: dict[str, dict[str, Any]]
    data: dict[str, str] = field(default_factory=dict)
    examples: dict[str, Outcomes] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)


def report_scores(config: ReportConfig, output: Path) -> dict[str, Any]:
    """OUTPUT/report.md, with scores.png and differences.png, and report.json.

    Args:
        config: of `results`, each a file that `evaluate` wrote or a directory that `train` did, the first is what
            others are compared with; `resamples` and `seed` of the bootstrap.
        output: directory to write.

    Returns:
        {"scores": {kind: {label: {word: main metric x100, "average"}}}, "published": {kind: {label: the same}},
        "differences": {label: {word: {"difference", "low", "high", "examples"}}}, "made_by": {label: …}, "settings",
        "versions"}.

    Raises:
        ValueError: a file that is no result, no task that all have, or results of different data under one name.
    """
    results = _read(config.results)
    settings = {
        "results": {result.label: digest(result.tasks) for result in results},
        "examples": [sorted(result.examples) for result in results],
        "resamples": config.resamples,
        "seed": config.seed,
    }
    if done := earlier_result(output / "report.json", output / "report.md", settings, config.overwrite):
        print(f"{output / 'report.md'} is there already, from the same results")
        return done
    scores = _scores(results)
    found = {
        "scores": scores,
        "published": published(scores, results),
        "differences": _differences(results, config.resamples, config.seed),
        "made_by": {result.label: result.made_by for result in results},
        "settings": settings,
        "versions": versions(),
    }
    page = _page(found, results)
    output.mkdir(parents=True, exist_ok=True)
    page += pictures(lambda: _plots(found, output))
    write_text(output / "report.md", "\n".join([*page, *_provenance(found)]) + "\n")
    write_json(output / "report.json", found)
    print("\n".join(page))
    print(f"-> {output / 'report.md'}")
    return found


def _read(names: Sequence[str]) -> list[Result]:
    paths = [Path(name).expanduser() for name in names]
    labels = [path.name if path.is_dir() else path.stem for path in paths]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        # what tells files of one name apart is where they are
        labels = [str(path) if label in repeated else label for label, path in zip(labels, paths, strict=True)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"results names {', '.join(sorted({x for x in labels if labels.count(x) > 1}))} twice")
    results = [_result(label, path) for label, path in zip(labels, paths, strict=True)]
    words = dict.fromkeys(word for result in results for word in result.tasks)
    for word in words:
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
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        scored = found["after"] if "after" in found else found
        tasks = scored["tasks"]
        if not tasks or not all(isinstance(task, dict) for task in tasks.values()):
            raise ValueError("no tasks")
    except (UnicodeDecodeError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} is no result of `raoe-train evaluate --output` (nor metrics.json of a run with evaluation.tasks)"
        ) from None
    settings = found.get("settings", {})
    made_by = {
        "model": found.get("model") or str(path),
        "files": (settings.get("model") or {}).get("files"),
        "commit": found.get("commit"),
        "versions": found.get("versions", {}),
    }
    return Result(label, tasks, dict(settings.get("tasks", {})), read_outcomes(file, settings), made_by)


def _scores(results: list[Result]) -> dict[str, dict[str, dict[str, float | None]]]:
    """{kind: {label: {word: main metric, "average": of all the kind's words}}}."""
    kinds: dict[str, list[str]] = {}
    for result in results:
        for word, task in result.tasks.items():
            words = kinds.setdefault(task.get("kind", DEFAULT), [])
            if word not in words:
                words.append(word)
    return {
        kind: {
            result.label: _row({word: main_score(result.tasks.get(word, {})) for word in words})
            for result in results
            if any(word in result.tasks for word in words)
        }
        for kind, words in kinds.items()
    }


def _row(values: dict[str, float | None]) -> dict[str, float | None]:
    return {**values, "average": mean_of_all(list(values.values()))} if len(values) > 1 else values


def published(
    scores: Mapping[str, Mapping[str, Mapping[str, Any]]], results: Sequence[Result]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """The papers' rows for the columns of `scores`, where a task is theirs: the same set with as many pairs. Averages
    are of these columns, not of the papers'."""
    known = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for kind, rows in scores.items():
        if kind not in known:
            continue
        tasks, sizes = known[kind]["tasks"], known[kind].get("sizes", {})
        words = [word for word in next(iter(rows.values())) if word != "average"]
        names = {word: _known_name(word, tasks, sizes, results) for word in words}
        if not any(names.values()):
            continue
        found[kind] = {
            f"{model} ({paper})": _row(
                {word: values[tasks.index(name)] if name else None for word, name in names.items()}
            )
            for paper, models in known[kind]["papers"].items()
            for model, values in models.items()
        }
    return found


def _known_name(word: str, tasks: Sequence[str], sizes: Mapping[str, int], results: Sequence[Result]) -> str | None:
    """The papers' name of a task; None where it is not theirs."""
    _, name = split_word(word)
    if name not in tasks:
        return None
    pairs = {result.tasks[word].get("pairs") for result in results if word in result.tasks}
    return name if name not in sizes or pairs == {sizes[name]} else None


def _differences(results: list[Result], resamples: int, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """{label: {word: {"difference", "low", "high", "examples"}}} of each result but the first, against the first."""
    first, *others = results
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for other in others:
        rows: dict[str, dict[str, Any]] = {}
        drawn = []
        for word in (word for word in first.tasks if word in other.tasks):
            a, b = main_score(first.tasks[word]), main_score(other.tasks[word])
            if a is None or b is None or word not in first.examples or word not in other.examples:
                continue
            try:
                drawn.append(bootstrap(first.examples[word], other.examples[word], resamples, seed))
            except ValueError as error:
                raise ValueError(f"task {word!r} of {first.label} and {other.label}: {error}") from None
            rows[word] = _between(b - a, drawn[-1], len(first.examples[word].values))
        if len(rows) > 1 and len({first.tasks[word].get("kind") for word in rows}) == 1:
            mean = float(np.mean([row["difference"] for row in rows.values()]))
            rows["average"] = _between(mean, np.mean(drawn, axis=0), sum(row["examples"] for row in rows.values()))
        if rows:
            found[other.label] = rows
    return found


def _between(difference: float, drawn: np.ndarray, examples: int) -> dict[str, Any]:
    low, high = interval(drawn)
    return {"difference": difference, "low": low, "high": high, "examples": examples}


def _page(found: Mapping[str, Any], results: Sequence[Result]) -> list[str]:
    lines = ["# Scores", "", "**Best** and <u>second</u> of the models that were evaluated here."]
    for kind, rows in found["scores"].items():
        words = list(next(iter(rows.values())))
        metrics = dict.fromkeys(
            task.get("main", "spearman")
            for result in results
            for task in result.tasks.values()
            if task.get("kind", DEFAULT) == kind
        )
        lines += ["", f"## {kind}", "", f"{', '.join(metrics)} x 100", "", *table_head(["model", *words])]
        marks = {word: _marks([row[word] for row in rows.values()]) for word in words}
        for number, label in enumerate(rows):
            lines.append(table_row([cell(label), *(marks[word][number] for word in words)]))
        papers = found["published"].get(kind, {})
        for label, row in papers.items():
            lines.append(table_row([f"*{label}*", *(_number(row[word]) for word in words)]))
        if papers:
            lines += ["", "In italics what papers report of their models; averages are of these columns."]
    lines += _difference_lines(found["differences"], results[0].label, found["settings"]["resamples"])
    return lines


def _marks(values: Sequence[float | None]) -> list[str]:
    """Numbers as text, the highest bold and the second underlined, as they are shown."""
    shown = [_number(value) for value in values]
    ranked = sorted({text for text in shown if text != "-"}, key=float, reverse=True)
    if len(shown) < 2:
        return shown
    best, second = [*ranked, None, None][:2]
    return [f"**{text}**" if text == best else f"<u>{text}</u>" if text == second else text for text in shown]


def _difference_lines(differences: Mapping[str, Any], first: str, resamples: int) -> list[str]:
    if not differences:
        return []
    words = list(dict.fromkeys(word for rows in differences.values() for word in rows))
    lines = [
        "",
        "## Differences",
        "",
        f"From {cell(first)}, with the {LEVEL} % interval of a paired bootstrap over examples, {resamples:,} "
        "resamples: how it would vary with other examples of the kind, not with other seeds of training. Bold where it "
        "leaves out 0.",
        "",
        *table_head(["task", "examples", *map(cell, differences)]),
    ]
    for word in words:
        cells = [_difference(rows.get(word)) for rows in differences.values()]
        count = next(rows[word]["examples"] for rows in differences.values() if word in rows)
        lines.append(table_row([word, str(count), *cells]))
    return lines


def _difference(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{row['difference']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"
    return f"**{text}**" if row["low"] > 0 or row["high"] < 0 else text


def _plots(found: Mapping[str, Any], output: Path) -> list[Path]:
    plot_main_metrics(found["scores"], output / "scores.png")
    made = [output / "scores.png"]
    if found["differences"]:
        plot_differences(found["differences"], next(iter(found["made_by"])), output / "differences.png")
        made.append(output / "differences.png")
    return made


def _provenance(found: Mapping[str, Any]) -> list[str]:
    lines = ["", "## Made by", ""]
    for label, made_by in found["made_by"].items():
        parts = [f"model {made_by['model']}"]
        if made_by["files"]:
            parts.append(f"its files {made_by['files'][:12]}")
        if made_by["commit"]:
            parts.append(f"commit {made_by['commit']}")
        parts += [f"{name} {version}" for name, version in made_by["versions"].items()]
        lines.append(f"- {cell(label)}: {', '.join(parts)}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
