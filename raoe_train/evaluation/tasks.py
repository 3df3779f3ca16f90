"""Tasks to evaluate encoders on: one registry of kinds, and one way from names to scores.

A new kind is a file with a function that reads a Task, and a line in KINDS.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raoe_train.config import PositiveInt, Seed, nearest
from raoe_train.data.conditional import is_conditional
from raoe_train.data.sources import is_file
from raoe_train.encoders.embed import encode_sentences
from raoe_train.encoders.settings import FrozenEncoder
from raoe_train.evaluation.classifiers import Classifier
from raoe_train.evaluation.finding import NoSuchTask
from raoe_train.evaluation.outcomes import Outcomes

KINDS = {
    "sts": "raoe_train.evaluation.sts:read_sts",
    "transfer": "raoe_train.evaluation.transfer:read_transfer",
    "rerank": "raoe_train.evaluation.rerank:read_rerank",
    "captions": "raoe_train.evaluation.caption_retrieval:read_caption_task",
    "mteb": "raoe_train.evaluation.mteb:read_mteb",
    "mteb-english-v1": "raoe_train.evaluation.mteb:read_english_v1",
    "mteb-english-v2": "raoe_train.evaluation.mteb:read_english_v2",
    "polarity": "raoe_train.evaluation.polarity:read_polarity",
}
"""The function of each kind, (name, Reading) -> Task; imported when asked for."""

SUITES: dict[str, tuple[str, ...]] = {
    "sts": ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sick"),
    "transfer": ("mr", "cr", "subj", "mpqa", "sst2", "trec", "mrpc"),
    "rerank": ("AskUbuntuDupQuestions", "MindSmallReranking", "SciDocsRR", "StackOverflowDupQuestions"),
}
"""Names that need no kind in front of them, by their kind. Other bare names are of kind DEFAULT."""

BENCHMARKS = {"mteb-english-v1": "MTEB(eng, v1)", "mteb-english-v2": "MTEB(eng, v2)"}
"""Suites that mteb has under these names; each is a kind of its own."""

DEFAULT = "sts"


@dataclass
class Polarity:
    """How the tasks polarity:NAME score what an encoder retrieves.

    Args:
        reference: encoder that says how similar sentences are; in train by default the one that training starts from
        k: sentences to retrieve
        discount: weights of the k; linear (Eq. 1) or none
        sources: sentences to retrieve from, drawn from train, so many times those of test
        max_sentences: largest number of test sentences, drawn with seed
        seed: seed of what is drawn
        curve: other numbers of sentences to retrieve, too
        cache: directory that keeps the reference's embeddings for other runs
    """

    reference: FrozenEncoder | None = None
    k: PositiveInt = 16
    discount: Literal["linear", "none"] = "linear"
    sources: PositiveInt = 5
    max_sentences: PositiveInt | None = None
    seed: Seed = 42
    curve: list[PositiveInt] = field(default_factory=list)
    cache: str | None = None


Batcher = Literal["bellm", "angle"] | None
"""How sentences of kinds sts and transfer are handed over: as they are, or as these papers' code does it."""


@dataclass(frozen=True)
class Reading:
    """How tasks are read."""

    data_dir: str | Path | None = None  # where names are looked up
    columns: Mapping[str, Any] | None = None  # {our column name: the files'}
    on_error: str = "raise"  # a malformed row, or "skip"
    prompt: str | None = None  # the encoder's; one with a {condition} makes sets of kind sts C-STS files
    cache: Path | None = None  # for results of tasks that take long, so that they can go on
    polarity: Polarity = field(default_factory=Polarity)
    classifier: Classifier | None = None  # of transfer tasks
    batcher: Batcher = None


@dataclass(frozen=True)
class Task:
    """A set of data with a measure, which is of embeddings of its sentences, or one that encodes by itself."""

    kind: str  # its name in KINDS
    main: str  # the main one of its metrics, x100 and the higher the better, which averages are taken of
    content: Any  # what a result depends on, as plain values: the data itself, or its name and version
    sentences: list[str] = field(default_factory=list)  # the n texts to encode; repeated ones are encoded once
    # [n, d] float32 embeddings -> ({metric: value, None where it is undefined}, what the main one is made of)
    score: Callable[[np.ndarray], tuple[dict[str, Any], Outcomes]] | None = None
    run: Callable[[Any, int], dict[str, Any]] | None = None  # (SentenceTransformer, batch size) -> {metric: value}


def suite_tasks(suites: Sequence[str]) -> list[str]:
    """The tasks of suites, each once; "all" is every one of SUITES."""
    for name in suites:
        if name not in (*SUITES, *BENCHMARKS, "all"):
            raise ValueError(f"suite must be of {', '.join([*SUITES, *BENCHMARKS])} or all, got {name!r}")
    found = [task for suite in SUITES if suite in suites or "all" in suites for task in SUITES[suite]]
    of_mteb = [pkgutil.resolve_name("raoe_train.evaluation.mteb:words")(name) for name in BENCHMARKS if name in suites]
    return [*found, *(word for words in of_mteb for word in words)]


def split_word(word: str) -> tuple[str, str]:
    """(kind, name) of a task's word, see read_tasks; ValueError for an unknown kind."""
    prefix, colon, rest = word.partition(":")
    if colon and prefix in KINDS:
        return prefix, rest
    if colon and prefix != "hub" and not is_file(word):
        near = nearest(repr(prefix), map(repr, KINDS))
        raise ValueError(f"task {word!r}: no kind {prefix!r}{near}; there are: {', '.join(KINDS)}")
    base = word.partition("#")[0].lower()
    for kind, names in SUITES.items():
        if base in (name.lower() for name in names):
            return kind, word
    return DEFAULT, word


def read_tasks(tasks: Sequence[str], data_dir: str | Path | None = None, **how: Any) -> dict[str, Task]:
    """Each task by its word, all of them read, so that what is wrong with one costs no encoding.

    Args:
        tasks: KIND:NAME or KIND:FILE, with KIND of KINDS. A bare NAME is of the kind that SUITES says, others and bare
            files (FILE, FILE#split, builtin#test) are sts. How NAME is found is said in docs/evaluation.md.
        data_dir: folder of the sets.
        how: the other fields of Reading.

    Raises:
        ValueError: no tasks, one twice, an unknown one (all that are not found are named), or as its kind.
        FileNotFoundError: a file that is not there.
    """
    if isinstance(tasks, str) or not tasks:
        raise ValueError(f"tasks must list at least one task, got {tasks!r}")
    if taken := {"average", "dev"}.intersection(tasks):
        raise ValueError(f"a task may not be called {min(taken)}, which is a column of reports: name its file")
    if repeated := sorted({task for task in tasks if list(tasks).count(task) > 1}):
        raise ValueError(f"tasks names {', '.join(repeated)} more than once")
    reading = Reading(data_dir, **how)
    found: dict[str, Task] = {}
    missing: dict[str, None] = {}
    for word in tasks:
        kind, name = split_word(word)
        if is_conditional(reading.prompt) and kind != "sts":
            raise ValueError(f"task {word!r}: the prompt has a {{condition}}, and tasks of kind {kind} have none")
        try:
            task: Task = pkgutil.resolve_name(KINDS[kind])(name, reading)
        except NoSuchTask as error:
            missing[str(error)] = None
            continue
        if reading.batcher and kind in ("sts", "transfer"):
            sentences = [batched(text, reading.batcher) for text in task.sentences]
            task = replace(task, sentences=sentences, content=[task.content, reading.batcher])
        found[word] = task
    if missing:
        raise NoSuchTask("\n".join(missing))
    return found


def batched(text: str, batcher: str) -> str:
    """A sentence as BeLLM's eval_sts.py hands it over: with a full stop where it has no end mark, and in place of a
    question mark. AnglE's eval_nli.py also makes double quotes single ones."""
    text = text if text[-1] in ".?\"'" else text + "."
    text = text.replace('"', "'") if batcher == "angle" else text
    return text[:-1] + "." if text.endswith("?") else text


def evaluate_encoder(
    model: Any, tasks: Sequence[str], data_dir: str | Path | None = None, batch_size: int = 64, **how: Any
) -> dict[str, Any]:
    """What evaluate_tasks finds on the tasks of read_tasks, which takes `tasks`, `data_dir` and `how`."""
    return evaluate_tasks(model, read_tasks(tasks, data_dir, **how), batch_size)


def evaluate_tasks(
    model: Any, tasks: Mapping[str, Task], batch_size: int = 64, outcomes: dict[str, Outcomes] | None = None
) -> dict[str, Any]:
    """{"tasks": {word: {"kind", "main", metric: value, …}}, "average": mean of the main metrics, x100}, and "averages",
    {kind: that of its tasks}, where there are several kinds; of benchmarks also "categories", {kind: {category:
    {"mean", "tasks": how many}}}. An average of something undefined is None.

    Texts that tasks share are encoded once. `outcomes`, where given, is filled with those of each task that has them.
    """
    scored = [task for task in tasks.values() if task.score]
    texts = [text for task in scored for text in task.sentences]
    embeddings = encode_sentences(model, texts, batch_size) if texts else np.empty((0, 0))
    parts = iter(np.split(embeddings, np.cumsum([len(task.sentences) for task in scored])))
    results: dict[str, dict[str, Any]] = {}
    for word, task in tasks.items():
        results[word] = {"kind": task.kind, "main": task.main}
        if task.score:
            metrics, made_of = task.score(next(parts))
            results[word] |= metrics
            if outcomes is not None:
                outcomes[word] = made_of
        if task.run:
            results[word] |= task.run(model, batch_size)

    def average(*kinds: str) -> float | None:
        return mean_of_all([main_score(result) for result in results.values() if result["kind"] in kinds])

    kinds = list(dict.fromkeys(task.kind for task in tasks.values()))
    found = {"tasks": results, "average": average(*kinds)}
    if categories := {kind: its for kind in kinds if (its := _categories(kind, results.values()))}:
        found["categories"] = categories
    return {**found, "averages": {kind: average(kind) for kind in kinds}} if len(kinds) > 1 else found


def _categories(kind: str, results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, list[float | None]] = {}
    for result in results:
        if result["kind"] == kind and "category" in result:
            found.setdefault(result["category"], []).append(main_score(result))
    return {name: {"mean": mean_of_all(scores), "tasks": len(scores)} for name, scores in sorted(found.items())}


def main_score(result: Mapping[str, Any]) -> float | None:
    """The main metric of one task's result, x100; None where it is undefined, or the result is empty."""
    return result.get(result.get("main", "spearman"))


def mean_of_all(scores: Sequence[float | None]) -> float | None:
    """The mean; None where one is None, or there are none."""
    defined = [score for score in scores if score is not None]
    return float(np.mean(defined)) if defined and len(defined) == len(scores) else None


def table(result: Mapping[str, Any]) -> str:
    """The result as a text table, one line a task, the kinds one after the other."""
    tasks = result["tasks"]
    kinds = list(dict.fromkeys(task.get("kind", DEFAULT) for task in tasks.values()))
    width = max(len(name) for name in ("average of all", *tasks))
    page = []
    for kind in kinds:
        chosen = {word: task for word, task in tasks.items() if task.get("kind", DEFAULT) == kind}
        rows = {
            word: {
                name: _cell(value) for name, value in task.items() if value is None or isinstance(value, (int, float))
            }
            for word, task in chosen.items()
        }
        metrics = list(dict.fromkeys(name for cells in rows.values() for name in cells))
        main = next(iter(chosen.values())).get("main", "spearman")
        average = _cell(result["average"] if len(kinds) == 1 else result["averages"][kind])
        page.append("".join([f"{'task':<{width}}", *(f"  {name:>9}" for name in metrics)]))
        for word, cells in [*rows.items(), ("average", {**dict.fromkeys(metrics, ""), main: average})]:
            line = (f"  {cells.get(name, '-'):>{max(9, len(name))}}" for name in metrics)
            page.append("".join([f"{word:<{width}}", *line]).rstrip())
        for name, of in result.get("categories", {}).get(kind, {}).items():
            page.append(f"{name:<{width}}  {_cell(of['mean']):>10}  {of['tasks']} tasks")
        page.append("")
    if len(kinds) > 1:
        page.append(f"{'average of all':<{width}}  {_cell(result['average']):>9}")
    return "\n".join(page).rstrip("\n")


def _cell(value: float | int | None) -> str:
    return "undefined" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
