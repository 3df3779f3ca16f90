"""What each job does, and how it is asked from Python: ``run``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from raoe_train.artifacts.disk_errors import explained
from raoe_train.artifacts.processes import rank_and_world
from raoe_train.recipe import load

# The function of each job; it takes the job's configuration. Imported when asked for.
FUNCTIONS = {
    "train": "raoe_train.jobs.train:train",
    "score": "raoe_train.jobs.score:score",
    "lists": "raoe_train.jobs.lists:lists",
    "mine": "raoe_train.jobs.mine:mine",
    "evaluate": "raoe_train.jobs.evaluate:evaluate",
    "encode": "raoe_train.jobs.encode:encode",
    "generate": "raoe_train.jobs.generate:generate",
    "sweep": "raoe_train.studies.sweep:sweep",
    "report": "raoe_train.studies.report:report",
    "export": "raoe_train.jobs.export:export",
    "check": "raoe_train.jobs.check:check",
}
SHARED = ("train", "score", "generate")  # what several processes do together


def run(job: str, recipe: str | Path | None = None, **overrides: Any) -> Any:
    """Do a job and return what it wrote.

    Args:
        job: train, score, lists, mine, evaluate, encode, generate, sweep, report, export or check.
        recipe: a YAML path or the name of a shipped recipe.
        overrides: keys of the recipe, nested (``training={"epochs": 1}``) or dotted
            (``**{"training.epochs": 1}``).

    Raises:
        ValueError: an unknown job, recipe or key, a value that cannot be, or several processes for a job of one.
        FileNotFoundError: a file that is not there.
        OSError: an output that cannot be written, or a full disk; the message says what to do.
    """
    config = load(job, recipe, overrides)
    if job not in SHARED and rank_and_world()[1] > 1:
        raise ValueError(f"{job} is for one process: start it without torchrun (for several: {', '.join(SHARED)})")
    module, name = FUNCTIONS[job].split(":")
    with explained(config.output if isinstance(getattr(config, "output", None), str) else None):
        return getattr(importlib.import_module(module), name)(config)
