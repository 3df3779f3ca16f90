"""Evaluation tasks. To add a kind of task, write a function like read_sts in sts.py, and add a line to KINDS."""

import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.config import nearest
from raoe_train.data.files import data_kind
from raoe_train.data.pairs import is_conditional
from raoe_train.data.public import STS, TRANSFER
from raoe_train.data.sources import BUILTIN, Source, is_file
from raoe_train.encoders.embed import encode_sentences, print_cut, prompt_of
from raoe_train.outputs import beside, digest, replacing
from raoe_train.parts import read_parts, write_parts
from raoe_train.processes import rank_and_world
from raoe_train.settings import Classifier, Polarity

KINDS = {
    "sts": "raoe_train.evaluation.sts:read_sts",
    "transfer": "raoe_train.evaluation.transfer:read_transfer",
    "polarity": "raoe_train.evaluation.polarity:read_polarity",
    "retrieval": "raoe_train.evaluation.retrieval:read_retrieval",
}
SUITES: dict[str, tuple[str, ...]] = {
    "sts": STS,
    "transfer": TRANSFER,
}  # task names that need no KIND: prefix
DEFAULT = "sts"  # kind of all other names without a KIND: prefix
ALL_PAIRS, TRAIN, TEST = "-all", "train", "test"
EXAMPLES = ".examples.npz"


@dataclass(frozen=True)
class Reading:
    """Options for reading tasks."""

    data_dir: str | Path | None = None  # folder in which task names are looked up
    columns: Mapping[str, Any] | None = None  # {raoe's column name: column in files}
    on_error: str = "raise"  # or "skip"; what to do with malformed rows
    prompt: str | None = None  # prompt of the encoder; with a {condition}, tasks of kind sts are C-STS files
    polarity: Polarity = field(default_factory=Polarity)
    classifier: Classifier | None = None  # for transfer tasks

    @property
    def rows(self) -> dict[str, Any]:
        return {"columns": self.columns, "on_error": self.on_error}


@dataclass(frozen=True)
class Outcomes:
    """An encoder's results for the n examples of a task, used to compare two encoders."""

    values: np.ndarray  # [n] float64: scores whose mean is the main metric x100 or, with gold, similarities
    gold: np.ndarray | None = None  # [n] float64, whose Spearman correlation with values is the main metric


@dataclass(frozen=True)
class Task:
    """A task, whose function `score` computes metrics from the embeddings of `sentences`."""

    kind: str  # name of the kind in KINDS
    main: str  # name of the main metric (x100, higher is better); averages are means of main metrics
    sentences: list[str]  # the n texts to encode; each distinct text is encoded once
    # [n, d] float32 embeddings, which it may rescale -> ({metric: value, or None}, outcomes behind the main metric)
    score: Callable[[np.ndarray], tuple[dict[str, Any], Outcomes]]
    n_queries: int = 0  # only in retrieval: the first n_queries sentences are queries, the rest are passages

    def by_prompt(self, model: Any) -> list[tuple[str | None, list[str]]]:
        """Group the sentences by the prompt that an encoder adds to them. Return [(prompt or None, sentences)]."""
        if not (n := self.n_queries):
            return [(model.prompts.get(model.default_prompt_name), self.sentences)]
        return [(prompt_of(model, "query"), self.sentences[:n]), (prompt_of(model, "document"), self.sentences[n:])]

    def print_cut(self, model: Any, name: str) -> int:
        texts = ((prompt or "") + text for prompt, part in self.by_prompt(model) for text in part)
        return print_cut(model, texts, name, "")


class NoSuchTask(ValueError):
    """Error for a task name that does not exist in data.dir."""


def suite_tasks(suites: Sequence[str]) -> list[str]:
    """Return the task names of suites, without duplicates. The suite "all" means all SUITES."""
    for name in suites:
        if name not in (*SUITES, "all"):
            raise ValueError(f"suite must be one of {', '.join(SUITES)}, all; got {name!r}")
    return [task for suite in SUITES if suite in suites or "all" in suites for task in SUITES[suite]]


def split_word(word: str) -> tuple[str, str]:
    """Split a task name such as KIND:NAME into (kind, name) (see read_tasks). Raise ValueError for an unknown kind."""
    prefix, colon, rest = word.partition(":")
    if colon and prefix in KINDS:
        return prefix, rest
    if colon and prefix != "hub" and not is_file(word):
        hint = nearest(repr(prefix), map(repr, KINDS))
        raise ValueError(f"task {word!r}: unknown kind {prefix!r}{hint}; kinds: {', '.join(KINDS)}")
    base = word.partition("#")[0].lower()
    for kind, names in SUITES.items():
        if base in (name.lower() for name in names):
            return kind, word
    return DEFAULT, word


def read_tasks(tasks: Sequence[str], data_dir: str | Path | None = None, **options: Any) -> dict[str, Task]:
    """Read all tasks before any text is encoded, so that errors are found early. Return {word: task}.

    A task is KIND:NAME or KIND:FILE, with KIND in KINDS. Without KIND, a NAME in SUITES gets the kind of its suite, and
    other names and files (FILE, FILE#SPLIT, builtin#test) are sts tasks. `options` are other fields of Reading.
    """
    if isinstance(tasks, str) or not tasks:
        raise ValueError(f"tasks must be a non-empty list of strings, got {tasks!r}")
    reading, by_word, missing = Reading(data_dir, **options), dict[str, Task](), dict[str, None]()
    for word in dict.fromkeys(tasks):
        kind, name = split_word(word)
        if is_conditional(reading.prompt) and kind != "sts":
            raise ValueError(f"task {word!r}: the prompt contains {{condition}}, but {kind} tasks have no conditions")
        try:
            by_word[word] = pkgutil.resolve_name(KINDS[kind])(name, reading)
        except NoSuchTask as error:
            missing[str(error)] = None
    if missing:
        raise NoSuchTask("\n".join(missing))
    return by_word


def source_of(word: str, data_dir: str | None) -> str | None:
    """Return the data source of a task, or None if the task does not exist."""
    kind, name = split_word(word)
    try:
        return find_task(name, data_dir, kind, whole=True)
    except NoSuchTask:
        return None


def find_task(task: str, data_dir: str | Path | None, kind: str = "sts", *, whole: bool = False) -> str:
    """Find the source of a task NAME, NAME#SPLIT or NAME-all. The source is data_dir/NAME.* or data_dir/KIND/NAME.*, or
    else data_dir/*/NAME.*. NAME alone selects the test split, unless `whole` is set.
    Return file and hub names unchanged."""
    name, _, split = task.partition("#")
    if is_file(name) or name in BUILTIN or name.startswith("hub:") or os.path.exists(task):
        return task
    if not data_dir:
        raise NoSuchTask("--data.dir is missing: set it to the folder in which to look up tasks by name")
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {str(folder)!r} (data.dir)")
    index = {**_data_files(folder, "*", "*/*"), **_data_files(folder, "*", f"{kind}/*")}
    files = index.get(name.lower(), [])
    if not files and name.endswith(ALL_PAIRS):
        files, whole = index.get(name.removesuffix(ALL_PAIRS).lower(), []), True
    if not files:
        hint, names = nearest(repr(name), map(repr, index)), ", ".join(sorted(index))
        raise NoSuchTask(f"no task {task!r} in {folder}{hint}; no file matches {name}.* or */{name}.*; tasks: {names}")
    if len(files) > 1:
        raise ValueError(f"task {task!r} is ambiguous: pass one of these files: {', '.join(map(str, files))}")
    file = str(files[0])
    if split:
        return f"{file}#{split}"
    splits: dict[str, None] = {}
    for _, row in [] if whole else Source(file).rows:
        if isinstance(row, dict) and "split" in row:
            splits[str(row["split"])] = None
            if TEST in splits:
                return f"{file}#{TEST}"
    if len(splits) > 1:
        names = ", ".join(splits)
        raise ValueError(f"{file} has splits {names}, but no {TEST!r}: use {file}#SPLIT or {task}{ALL_PAIRS}")
    return file


def _data_files(folder: Path, *places: str) -> dict[str, list[Path]]:
    """Return {lower-case name: data files} for glob patterns in a folder."""
    files: dict[str, list[Path]] = {}
    for path in sorted(path for place in places for path in folder.glob(place)):
        if data_kind(path) and path.is_file():
            files.setdefault(Path(path.name.removesuffix(".gz")).stem.lower(), []).append(path)
    return files


def encode_tasks(
    model: Any, tasks: Sequence[Task], batch_size: int, folder: Path | None = None
) -> Iterator[np.ndarray]:
    """Yield the embeddings of each task's sentences. Tasks without queries are encoded together, each text once.

    Args:
        folder: folder for finished embeddings, from which an interrupted job resumes. With a folder, each process
            encodes its share of the texts, and ranks other than 0 yield empty arrays.
    """

    def encode(*groups: tuple[dict[str, Any], list[str]]) -> np.ndarray:
        """Encode groups of texts, where each group has its own options for `encode_sentences`."""
        if folder is None:
            return np.concatenate([encode_sentences(model, texts, batch_size, **options) for options, texts in groups])
        paths, places, size = list[Path](), list[int](), 0
        for options, texts in groups:
            embed = partial(encode_sentences, model, batch_size=batch_size, **options)
            rows = {text: row for row, text in enumerate(dict.fromkeys(texts), size)}
            paths += write_parts(folder / digest([options, *rows])[:16], [*rows], embed, "evaluate")
            places += [rows[text] for text in texts]
            size += len(rows)
        if rank_and_world()[0] > 0:
            return np.empty((len(places), 0))
        return read_parts(paths) if size == len(places) else read_parts(paths)[places]  # no copy of a large corpus

    texts = [text for task in tasks if not task.n_queries for text in task.sentences]
    shared, start = encode(({}, texts)) if texts else np.empty((0, 0)), 0
    for task in tasks:
        if task.n_queries:
            yield encode(*(({"prompt": prompt}, texts) for prompt, texts in task.by_prompt(model)))
        else:
            yield shared[start : (start := start + len(task.sentences))]


def evaluate_tasks(
    model: Any,
    tasks: Mapping[str, Task],
    batch_size: int = 64,
    outcomes: dict[str, Outcomes] | None = None,
    truncate_dim: int | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a SentenceTransformer. Return {"tasks", "average", "averages"} as the job `evaluate` does. If
    `outcomes` is a dict, each task's Outcomes are added under the task's name. `truncate_dim` is the number of leading
    dimensions to use, or None for all. For `folder`, see encode_tasks."""
    parts = encode_tasks(model, [*tasks.values()], batch_size, folder)
    results: dict[str, dict[str, Any]] = {}
    for word, task in tasks.items():
        rows = next(parts)[:, :truncate_dim]
        if (truncate_dim or 0) > rows.shape[1]:
            raise ValueError(f"truncate_dim {truncate_dim} exceeds the encoder's {rows.shape[1]} dimensions")
        metrics, examples = task.score(rows)
        del rows  # before the embeddings of the next task are read
        results[word] = {"kind": task.kind, "main": task.main, **metrics}
        if outcomes is not None:
            outcomes[word] = examples
    by_kind: dict[str, list[float | None]] = {}
    for result in results.values():
        by_kind.setdefault(result["kind"], []).append(main_score(result))
    summary: dict[str, Any] = {"tasks": results, "average": mean_of_all([*map(main_score, results.values())])}
    if len(by_kind) > 1:
        summary["averages"] = {kind: mean_of_all(scores) for kind, scores in by_kind.items()}
    return summary


def main_score(result: Mapping[str, Any]) -> float | None:
    """Return the main metric in a task's result, x100, or None if the metric is undefined or the result is empty."""
    return result.get(result.get("main", "spearman"))


def mean_of_all(scores: Sequence[Any]) -> float | None:
    """Return the mean of scores, or None if there are no scores or any of them is None."""
    return None if None in scores or not scores else float(np.mean(scores))


def table(result: Mapping[str, Any]) -> str:
    """Format a result as a text table, one line for each task, grouped by kind."""
    by_kind: dict[str, dict[str, Any]] = {}
    for word, task in result["tasks"].items():
        by_kind.setdefault(task.get("kind", DEFAULT), {})[word] = task
    width = max(len(name) for name in ("average of all", *result["tasks"]))
    page = []
    for kind, tasks in by_kind.items():
        rows = {word: {name: _cell(value) for name, value in task.items()} for word, task in tasks.items()}
        metrics = list(dict.fromkeys(name for cells in rows.values() for name, text in cells.items() if text))
        main = next(iter(tasks.values())).get("main", "spearman")
        average = result["average"] if len(by_kind) == 1 else result["averages"][kind]
        page.append("".join([f"{'task':<{width}}", *(f"  {name:>9}" for name in metrics)]))
        for word, cells in [*rows.items(), ("average", {**dict.fromkeys(metrics, ""), main: _cell(average)})]:
            line = (f"  {cells.get(name, '-'):>{max(9, len(name))}}" for name in metrics)
            page.append("".join([f"{word:<{width}}", *line]).rstrip())
        page.append("")
    if len(by_kind) > 1:
        page.append(f"{'average of all':<{width}}  {_cell(result['average']):>9}")
    return "\n".join(page).rstrip("\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "undefined" if value is None else str(value) if isinstance(value, int) else ""


def write_outcomes(result: Path, outcomes: Mapping[str, Outcomes], settings: Mapping[str, Any]) -> None:
    """Write the outcomes of each task, and a digest of the settings, to a file next to the result."""
    arrays = {f"{word}\tvalues": each.values for word, each in outcomes.items()}
    arrays |= {f"{word}\tgold": each.gold for word, each in outcomes.items() if each.gold is not None}
    with replacing(beside(result, EXAMPLES)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, made_from=np.array(digest(settings)), **arrays)
