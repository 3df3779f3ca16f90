"""Tasks of MTEB (Muennighoff et al. 2023) by their names there, data from the hub, evaluated by mteb itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raoe_train.evaluation.tasks import Reading, Task


@dataclass(frozen=True)
class MtebTask(Task):
    """A task object of mteb."""

    kind = "mteb"
    main = "main_score"
    task: Any
    cache: Path | None = None  # where results are kept

    def content(self) -> Any:
        from importlib.metadata import version

        metadata = self.task.metadata
        return [metadata.name, metadata.dataset.get("revision"), version("mteb")]

    def run(self, model: Any, batch_size: int) -> dict[str, Any]:
        """{"main_score": mean over splits and subsets, "metric": what that is, "scores": {split: {subset: of it}}}, and
        of reranking tasks "map" and "mrr" over all candidates; x100. What is in the cache is not evaluated again."""
        import mteb

        watched = sys.stderr.isatty()
        training = model.training
        found = mteb.evaluate(
            model,
            self.task,
            cache=None if self.cache is None else mteb.ResultCache(self.cache),
            encode_kwargs={"batch_size": batch_size, "show_progress_bar": watched},
            show_progress_bar=watched,
            co2_tracker=False,
        ).task_results[0]
        model.train(training)
        result = {
            "main_score": 100 * float(found.get_score()),
            "metric": str(self.task.metadata.main_score),
            "scores": {
                split: {part["hf_subset"]: 100 * float(part["main_score"]) for part in parts}
                for split, parts in found.scores.items()
            },
        }
        if self.task.metadata.type == "Reranking":
            for name in ("map", "mrr"):
                result[name] = 100 * float(found.get_score(getter=lambda scores, name=name: scores[f"{name}_at_1000"]))
        return result


def read_mteb(name: str, reading: Reading) -> MtebTask:
    """A task by its name in mteb. Its data is loaded when it is run."""
    import mteb

    try:
        return MtebTask(mteb.get_task(name), reading.cache)
    except KeyError as error:  # which suggests the nearest
        raise ValueError(f"mteb has no task {name!r}: {error.args[0]}") from None
