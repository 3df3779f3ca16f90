"""Tasks of MTEB (Muennighoff et al. 2023) by their names there, data from the hub, evaluated by mteb itself."""

import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raoe_train.evaluation.tasks import Reading, Task


def read_mteb(name: str, reading: Reading) -> Task:
    """A task by its name in mteb. Its data is loaded when it is run."""
    import mteb

    try:
        return of_task(mteb.get_task(name), reading.cache)
    except KeyError as error:  # its message suggests the nearest name
        raise ValueError(f"mteb has no task {name!r}: {error.args[0]}") from None


def of_task(task: Any, cache: Path | None = None) -> Task:
    """An mteb task, whose results are kept in `cache`."""
    content = [task.metadata.name, task.metadata.dataset.get("revision"), version("mteb")]
    return Task("mteb", "main_score", content, run=partial(_run, task, cache))


def _run(task: Any, cache: Path | None, model: Any, batch_size: int) -> dict[str, Any]:
    """{"main_score": mean over the task's splits and subsets, "metric": its name, "scores": {split: {subset: its main
    score}}}, and of reranking tasks "map" and "mrr" over all candidates; x100. Results in the cache are reused."""
    import mteb

    watched, training = sys.stderr.isatty(), model.training
    found = mteb.evaluate(
        model,
        task,
        cache=None if cache is None else mteb.ResultCache(cache),
        encode_kwargs={"batch_size": batch_size, "show_progress_bar": watched},
        show_progress_bar=watched,
        co2_tracker=False,
    ).task_results[0]
    model.train(training)
    scores = {
        split: {part["hf_subset"]: 100 * float(part["main_score"]) for part in parts}
        for split, parts in found.scores.items()
    }
    result = {"main_score": 100 * float(found.get_score()), "metric": str(task.metadata.main_score), "scores": scores}
    for name in ("map", "mrr") if task.metadata.type == "Reranking" else ():
        result[name] = 100 * float(found.get_score(getter=lambda scores, name=name: scores[f"{name}_at_1000"]))
    return result
