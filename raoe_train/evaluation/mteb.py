"""Tasks of MTEB (Muennighoff et al. 2023) by name. The package mteb loads their data and evaluates them."""

import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raoe_train.evaluation.tasks import Reading, Task


def read_mteb(name: str, reading: Reading) -> Task:
    """Find a task by its name in mteb, without loading its data. The data is loaded when the task runs."""
    import mteb

    try:
        return make_task(mteb.get_task(name), reading.cache)
    except KeyError as error:  # its message suggests a similar name
        raise ValueError(f"mteb has no task {name!r}: {error.args[0]}") from None


def make_task(task: Any, cache: Path | None = None) -> Task:
    """Create a Task from a task of mteb. Its results are cached in `cache`."""
    content = [task.metadata.name, task.metadata.dataset.get("revision"), version("mteb")]
    return Task("mteb", "main_score", content, run=partial(_run, task, cache))


def _run(task: Any, cache: Path | None, model: Any, batch_size: int) -> dict[str, Any]:
    """Return {"main_score": mean over splits and subsets, "metric": its name, "scores": {split: {subset: main score}}},
    and for reranking tasks "map" and "mrr" over all candidates. All scores are x100. Cached results are reused."""
    import mteb

    show_bar, training = sys.stderr.isatty(), model.training
    options: dict[str, Any] = {"encode_kwargs": {"batch_size": batch_size, "show_progress_bar": show_bar}}
    options |= {"show_progress_bar": show_bar, "co2_tracker": False}
    results: Any = mteb.evaluate(
        model, task, cache=None if cache is None else mteb.ResultCache(cache), **options
    ).task_results[0]
    model.train(training)
    scores = {
        split: {part["hf_subset"]: 100 * float(part["main_score"]) for part in parts}
        for split, parts in results.scores.items()
    }
    result = {"main_score": 100 * float(results.get_score()), "metric": str(task.metadata.main_score), "scores": scores}
    for name in ("map", "mrr") if task.metadata.type == "Reranking" else ():
        result[name] = 100 * float(results.get_score(getter=lambda scores, name=name: scores[f"{name}_at_1000"]))
    return result
