"""Semantic textual similarity: correlation of an encoder's cosines with human scores, on sets in local
files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.config import PolarityConfig
from raoe_train.data import PairData
from raoe_train.data.conditional import is_conditional, read_scored
from raoe_train.data.files import data_kind, read_rows, write_json
from raoe_train.data.sources import BUILTIN, is_file
from raoe_train.evaluation.analyses import analyse, check_analyses
from raoe_train.evaluation.conditional import conditional_prompt, read_unlabelled, submit
from raoe_train.evaluation.encode import cosines, encode_sentences
from raoe_train.evaluation.polarity import PREFIX, evaluate_polarity
from raoe_train.provenance import digest, earlier_result, fingerprint, versions

if TYPE_CHECKING:
    from raoe_train.config import EvaluateConfig

ALL_PAIRS = "-all"
TEST = "test"


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """The job `evaluate`: see evaluate_encoder; writes the result to `output` if that is given, and prints it
    as a table. With `analyses`, see there; with `submission`, predictions for Conditional STS.

    Returns:
        {"tasks": {name: {"spearman", "pearson", "pairs"}}, "average", "analyses": {name: …}, "model", "versions",
        "settings"}.

    Raises:
        ValueError: as evaluate_encoder; or the output of other settings is there and overwrite is not set.
    """
    # before the model is loaded, so that a misspelt task costs no time
    prompt = conditional_prompt(config.model.name, config.model.prompt)
    check_analyses(config.analyses)
    rows = None
    if config.submission:
        if not config.data.input:
            raise ValueError("data.input is missing: the C-STS rows to predict")
        rows = read_unlabelled(config.data.input, config.data.columns, prompt)
    pairs: dict[str, PairData] = {}
    if config.tasks or rows is None:
        pairs = read_tasks(
            config.tasks,
            config.data.dir,
            columns=config.data.columns,
            on_error=config.data.on_error,
            prompt=prompt,
        )
    settings = {
        "model": {**asdict(config.model), "device": None, "files": fingerprint(config.model.name)},
        "tasks": {name: digest(data.columns()) for name, data in pairs.items()},
        "analyses": config.analyses,
    }
    result = None
    output = Path(config.output).expanduser() if config.output else None
    if output and rows is None:
        result = earlier_result(output, output, settings, config.overwrite)
    if result is None:
        from raoe_train.encoder import load_encoder

        model = load_encoder(config.model)
        result = _correlations(model, pairs, config.batch_size)
        if config.analyses:
            result["analyses"] = analyse(config.analyses, model, pairs, output, config.batch_size)
        if rows is not None:
            result["predictions"] = submit(model, rows, str(prompt), str(config.submission), config.batch_size)
        result.update(model=config.model.name, versions=versions(), settings=settings)
        if output:
            write_json(output, result)
    if pairs:
        print(table(result))
    for name, found in result.get("analyses", {}).items():
        print(f"{name}: {json.dumps({key: value for key, value in found.items() if key != 'examples'})}")
    return result


def evaluate_encoder(
    model: Any,
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    batch_size: int = 64,
    *,
    prompt: str | None = None,
    polarity: PolarityConfig | None = None,
) -> dict[str, Any]:
    """Spearman's and Pearson's correlation, x100, of pair cosines and scores over all pairs of a set
    together.

    That is SentEval's "all" setting: the subsets of STS12-16 are concatenated, not averaged.

    Args:
        model: a SentenceTransformer.
        tasks: names of sets, found in data_dir as NAME.* or */NAME.*, or sources (FILE, FILE#split,
            builtin#test). NAME is the test split where the file has splits; NAME#dev is another one of its
            splits; NAME-all is all pairs.
        data_dir: folder of the sets.
        batch_size: sentences at a time.
        prompt: where it has a {condition}, the sets are C-STS files, see read_scored.
        polarity: of tasks polarity:NAME, see evaluate_polarity.

    Returns:
        {"tasks": {name: {"spearman": float, "pearson": float, "pairs": int}}, "average": mean Spearman}. A
        correlation is None, and so is the average, where all cosines of a set are equal: it is undefined. Of tasks
        polarity:NAME the entry is what evaluate_polarity gives, and they have no part in the average.

    Raises:
        ValueError: an unknown or ambiguous task, a row without a score, or equal scores everywhere in a set.
    """
    sts = [task for task in tasks if not task.startswith(PREFIX)]
    result = _correlations(model, read_tasks(sts, data_dir, prompt=prompt) if sts else {}, batch_size)
    for task in tasks:
        if task.startswith(PREFIX):
            result["tasks"][task] = evaluate_polarity(model, task, data_dir, polarity or PolarityConfig(), batch_size)
    return result


def read_tasks(
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    on_error: str = "raise",
    prompt: str | None = None,
) -> dict[str, PairData]:
    """The scored pairs of each task, by its name; see evaluate_encoder, and for `prompt` read_scored."""
    if isinstance(tasks, str) or not tasks:
        raise ValueError(f"tasks must list at least one task, got {tasks!r}")
    if repeated := sorted({task for task in tasks if list(tasks).count(task) > 1}):
        raise ValueError(f"tasks names {', '.join(repeated)} more than once")
    # labels have no part in this: a set may hold any, or none
    if not is_conditional(prompt):  # there it is the score
        columns = {**(columns or {}), "label": "none"}
    found = {}
    for task in tasks:
        source = find_task(task, data_dir)
        found[task] = read_scored(source, prompt, columns=columns, on_error=on_error)
        if len(set(found[task].score or ())) < 2:
            raise ValueError(f"{source}: all scores are equal, so no correlation is defined")
    return found


def find_task(task: str, data_dir: str | Path | None) -> str:
    """The source that a task stands for: FILE#test where the file has a test split, FILE where it has one
    split or none, FILE#SPLIT for NAME#SPLIT."""
    name, _, split = task.partition("#")
    if split and not is_file(name) and name not in BUILTIN and data_dir:
        return find_task(name + ALL_PAIRS, data_dir) + f"#{split}"
    if is_file(task) or task.partition("#")[0] in BUILTIN or task.startswith("hub:"):
        return task
    if not data_dir:
        raise ValueError(f"data.dir is missing: the folder where task {task!r} is looked up")
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {str(folder)!r} (data.dir)")
    files = _named(folder, task)
    every = not files and task.endswith(ALL_PAIRS)
    if every:
        files = _named(folder, task.removesuffix(ALL_PAIRS))
    if not files:
        there = sorted({_name(path) for path in (*folder.glob("*"), *folder.glob("*/*")) if data_kind(path)})
        raise ValueError(
            f"no task {task!r} in {folder}: neither {task}.* nor */{task}.*; there are: {', '.join(there)}"
        )
    if len(files) > 1:
        raise ValueError(f"task {task!r} could be {' or '.join(map(str, files))}; name the file instead")
    splits = [] if every else _splits(files[0])
    if len(splits) > 1 and TEST not in splits:
        raise ValueError(
            f"{files[0]} has splits {', '.join(splits)} and none is {TEST!r}; "
            f"name {files[0]}#SPLIT or {task}{ALL_PAIRS}"
        )
    return f"{files[0]}#{TEST}" if TEST in splits else str(files[0])


def _named(folder: Path, task: str) -> list[Path]:
    return sorted(
        path for path in (*folder.glob("*"), *folder.glob("*/*")) if data_kind(path) and _name(path) == task
    )


def _name(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def _splits(path: Path) -> list[str]:
    splits = (
        fields["split"] for _, fields in read_rows(path) if isinstance(fields, dict) and "split" in fields
    )
    return list(dict.fromkeys(map(str, splits)))


def _correlations(model: Any, pairs: Mapping[str, PairData], batch_size: int) -> dict[str, Any]:
    # all tasks in one go: what they share (sick and sick-all, STS-B and the STS years) is encoded once
    if not pairs:
        return {"tasks": {}, "average": None}
    sentences = [text for data in pairs.values() for text in (*data.sentence1, *data.sentence2)]
    embeddings = encode_sentences(model, sentences, batch_size)
    tasks = {}
    start = 0
    for name, data in pairs.items():
        middle, end = start + len(data), start + 2 * len(data)
        similarity = cosines(embeddings[start:middle], embeddings[middle:end])
        tasks[name] = {**correlate(similarity, np.asarray(data.score)), "pairs": len(data)}
        start = end
    defined = [value for result in tasks.values() if (value := result["spearman"]) is not None]
    return {"tasks": tasks, "average": float(np.mean(defined)) if len(defined) == len(tasks) else None}


def correlate(similarity: np.ndarray, scores: np.ndarray) -> dict[str, float | None]:
    """{"spearman", "pearson"} x100 of two vectors [n]; None where all similarities are equal."""
    from scipy import stats

    if np.ptp(similarity) == 0:
        return {"spearman": None, "pearson": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        pearson = stats.pearsonr(similarity, scores).statistic
    return {
        "spearman": 100 * float(stats.spearmanr(similarity, scores).statistic),
        "pearson": 100 * float(pearson),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as a text table, one line a task."""

    def number(value: float | None) -> str:
        return f"{value:9.2f}" if value is not None else "undefined"

    width = max(len(name) for name in ("average", *result["tasks"]))
    lines = [f"{'task':<{width}}  {'spearman':>9}  {'pearson':>9}  {'pairs':>7}"]
    for name, task in result["tasks"].items():
        lines.append(
            f"{name:<{width}}  {number(task['spearman'])}  {number(task['pearson'])}  {task['pairs']:>7}"
        )
    return "\n".join([*lines, f"{'average':<{width}}  {number(result['average'])}"])
