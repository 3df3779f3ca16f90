"""Tasks to evaluate encoders on. A new kind is a line in KINDS, and a function: (name, Reading) -> Task."""

import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.resume import beside
from raoe_train.artifacts.writing import replacing
from raoe_train.config import PositiveInt, Seed, nearest
from raoe_train.data.files import data_kind, read_rows
from raoe_train.data.pairs import is_conditional
from raoe_train.data.public import STS, TRANSFER
from raoe_train.data.sources import BUILTIN, is_file
from raoe_train.encoders.embed import encode_sentences
from raoe_train.encoders.settings import FrozenEncoder
from raoe_train.evaluation.classifiers import Classifier

KINDS = {
    "sts": "raoe_train.evaluation.sts:read_sts",
    "transfer": "raoe_train.evaluation.transfer:read_transfer",
    "rerank": "raoe_train.evaluation.retrieval:read_rerank",
    "captions": "raoe_train.evaluation.retrieval:read_caption_task",
    "mteb": "raoe_train.evaluation.mteb:read_mteb",
    "polarity": "raoe_train.evaluation.polarity:read_polarity",
}
SUITES: dict[str, tuple[str, ...]] = {
    "sts": STS,
    "transfer": TRANSFER,
    "rerank": ("AskUbuntuDupQuestions", "MindSmallReranking", "SciDocsRR", "StackOverflowDupQuestions"),
}  # names that need no kind in front of them
DEFAULT = "sts"  # kind of other bare names
ALL_PAIRS, TRAIN, TEST = "-all", "train", "test"
EXAMPLES = ".examples.npz"


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
    """

    reference: FrozenEncoder | None = None
    k: PositiveInt = 16
    discount: Literal["linear", "none"] = "linear"
    sources: PositiveInt = 5
    max_sentences: PositiveInt | None = None
    seed: Seed = 42
    curve: list[PositiveInt] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """How tasks are read."""

    data_dir: str | Path | None = None  # where names are looked up
    columns: Mapping[str, Any] | None = None  # {our column name: the files'}
    on_error: str = "raise"  # a malformed row, or "skip"
    prompt: str | None = None  # the encoder's; one with a {condition} makes sets of kind sts C-STS files
    cache: Path | None = None  # for results of tasks that take long, so that they can resume
    polarity: Polarity = field(default_factory=Polarity)
    classifier: Classifier | None = None  # of transfer tasks

    @property
    def rows(self) -> dict[str, Any]:
        return {"columns": self.columns, "on_error": self.on_error}


@dataclass(frozen=True)
class Outcomes:
    """How an encoder did on each of n examples of a task, so that two encoders can be compared."""

    values: np.ndarray  # [n] float64 whose mean is the main metric x100; with gold, what the encoder gives
    gold: np.ndarray | None = None  # [n] float64, whose Spearman correlation with values is the main metric


@dataclass(frozen=True)
class Task:
    """Data with a metric: a score of embeddings of its sentences, or a run of its own."""

    kind: str  # its name in KINDS
    main: str  # the name of its main metric, x100 and the higher the better, which averages are taken of
    content: Any  # what a result depends on, as plain values: the data itself, or its name and version
    sentences: list[str] = field(default_factory=list)  # the n texts to encode; repeated ones are encoded once
    # [n, d] float32 embeddings -> ({metric: value, None where it is undefined}, what the main one is made of)
    score: Callable[[np.ndarray], tuple[dict[str, Any], Outcomes]] | None = None
    run: Callable[[Any, int], dict[str, Any]] | None = None  # (SentenceTransformer, batch size) -> {metric: value}


class NoSuchTask(ValueError):
    """A name that nothing in data.dir has."""


def suite_tasks(suites: Sequence[str]) -> list[str]:
    """The tasks of suites, each once; "all" is every one of SUITES."""
    for name in suites:
        if name not in (*SUITES, "all"):
            raise ValueError(f"suite must be of {', '.join(SUITES)} or all, got {name!r}")
    return [task for suite in SUITES if suite in suites or "all" in suites for task in SUITES[suite]]


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
    """Each task by its word, all of them read, so that an error in one costs no encoding.

    Words are KIND:NAME or KIND:FILE, with KIND of KINDS. A bare NAME is of the kind that SUITES says, others and bare
    files (FILE, FILE#split, builtin#test) are sts. `how` is the other fields of Reading.
    """
    if isinstance(tasks, str) or not tasks:
        raise ValueError(f"tasks must list at least one task, got {tasks!r}")
    if taken := {"average", "dev"}.intersection(tasks):
        raise ValueError(f"a task may not be called {min(taken)}, which is a column of reports: name its file")
    if repeated := sorted(task for task, count in Counter(tasks).items() if count > 1):
        raise ValueError(f"tasks names {', '.join(repeated)} more than once")
    reading, found, missing = Reading(data_dir, **how), dict[str, Task](), dict[str, None]()
    for word in tasks:
        kind, name = split_word(word)
        if is_conditional(reading.prompt) and kind != "sts":
            raise ValueError(f"task {word!r}: the prompt has a {{condition}}, and tasks of kind {kind} have none")
        try:
            found[word] = pkgutil.resolve_name(KINDS[kind])(name, reading)
        except NoSuchTask as error:
            missing[str(error)] = None
    if missing:
        raise NoSuchTask("\n".join(missing))
    return found


def find_task(task: str, data_dir: str | Path | None, kind: str = "sts", *, whole: bool = False) -> str:
    """The source that NAME, NAME#SPLIT or NAME-all stands for: the file data_dir/NAME.* or data_dir/KIND/NAME.*, else
    data_dir/*/NAME.*; its test split, where it has splits, unless it is to be `whole`. A source stands for itself."""
    name, _, split = task.partition("#")
    if is_file(name) or name in BUILTIN or name.startswith("hub:") or os.path.exists(task):
        return task
    if not data_dir:
        raise NoSuchTask("data.dir is missing: the folder where tasks are looked up by name")
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {str(folder)!r} (data.dir)")
    known = {**_data_files(folder, "*", "*/*"), **_data_files(folder, "*", f"{kind}/*")}
    files = known.get(name.lower(), [])
    if not files and name.endswith(ALL_PAIRS):
        files, whole = known.get(name.removesuffix(ALL_PAIRS).lower(), []), True
    if not files:
        near, there = nearest(repr(name), map(repr, known)), ", ".join(sorted(known))
        raise NoSuchTask(f"no task {task!r} in {folder}{near}: neither {name}.* nor */{name}.*; there are: {there}")
    if len(files) > 1:
        raise ValueError(f"task {task!r} could be {' or '.join(map(str, files))}; name the file instead")
    file = str(files[0])
    if split:
        return f"{file}#{split}"
    splits: dict[str, None] = {}
    for _, fields in [] if whole else read_rows(file):
        if isinstance(fields, dict) and "split" in fields:
            splits[str(fields["split"])] = None
            if TEST in splits:
                return f"{file}#{TEST}"
    if len(splits) > 1:
        there = f"splits {', '.join(splits)} and none is {TEST!r}"
        raise ValueError(f"{file} has {there}; name {file}#SPLIT or {task}{ALL_PAIRS}")
    return file


def _data_files(folder: Path, *places: str) -> dict[str, list[Path]]:
    """{name in small letters: data files} at these places in a folder."""
    files: dict[str, list[Path]] = {}
    for path in sorted(path for place in places for path in folder.glob(place)):
        if data_kind(path) and path.is_file():
            files.setdefault(Path(path.name.removesuffix(".gz")).stem.lower(), []).append(path)
    return files


def evaluate_tasks(
    model: Any, tasks: Mapping[str, Task], batch_size: int = 64, outcomes: dict[str, Outcomes] | None = None
) -> dict[str, Any]:
    """Scores of a SentenceTransformer: "tasks", "average" and "averages" of the job `evaluate`. Texts that tasks share
    are encoded once. `outcomes` is filled with those of each task that has them."""
    scored = [task for task in tasks.values() if task.score]
    texts = [text for task in scored for text in task.sentences]
    embeddings = encode_sentences(model, texts, batch_size) if texts else np.empty((0, 0))
    parts = iter(np.split(embeddings, np.cumsum([len(task.sentences) for task in scored])))
    results: dict[str, dict[str, Any]] = {}
    for word, task in tasks.items():
        results[word] = {"kind": task.kind, "main": task.main}
        if task.score:
            metrics, examples = task.score(next(parts))
            results[word] |= metrics
            if outcomes is not None:
                outcomes[word] = examples
        if task.run:
            results[word] |= task.run(model, batch_size)
    by_kind: dict[str, list[float | None]] = {}
    for result in results.values():
        by_kind.setdefault(result["kind"], []).append(main_score(result))
    found: dict[str, Any] = {"tasks": results, "average": mean_of_all([*map(main_score, results.values())])}
    if len(by_kind) > 1:
        found["averages"] = {kind: mean_of_all(scores) for kind, scores in by_kind.items()}
    return found


def main_score(result: Mapping[str, Any]) -> float | None:
    """The main metric of one task's result, x100; None where it is undefined, or the result is empty."""
    return result.get(result.get("main", "spearman"))


def mean_of_all(scores: Sequence[Any]) -> float | None:
    """The mean; None where one is None, or there are none."""
    return None if None in scores or not scores else float(np.mean(scores))


def table(result: Mapping[str, Any]) -> str:
    """The result as a text table, one line a task, the kinds one after the other."""
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
    """Keep the outcomes of each task, by its word, beside the result that has those settings."""
    arrays = {f"{word}\tvalues": of.values for word, of in outcomes.items()}
    arrays |= {f"{word}\tgold": of.gold for word, of in outcomes.items() if of.gold is not None}
    with replacing(beside(result, EXAMPLES)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, made_from=np.array(digest(settings)), **arrays)
