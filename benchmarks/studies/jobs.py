"""Everything that the studies use of raoe_train. No other file here imports it, so a change there is adapted here.

Public are `rt.run` and `rt.load_encoder`. The other names are not: the configuration check (`raoe_train.cli.load`),
the reader of lists, the examples and tasks of `evaluate`, and three helpers that write Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import raoe_train as rt
from raoe_train import cli
from raoe_train.artifacts.markdown import cell, made_with, table
from raoe_train.data.triplets import list_table
from raoe_train.evaluation.tasks import Outcomes, main_score, read_outcomes, read_tasks, split_word

__all__ = ["Outcomes", "cell", "made_with", "main_score", "read_outcomes", "split_word", "table"]


def run(job: str, recipe: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job of raoe-train and return its result."""
    return rt.run(job, recipe, **overrides)


def run_alone(job: str, recipe: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job in a new process, so that its peak memory is its own. Its errors are raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, job, recipe, dict(overrides)).result()


def check(job: str, recipe: str | None, overrides: Mapping[str, Any]) -> None:
    """Raise ValueError if the job does not accept this configuration. Nothing is run."""
    cli.load(job, recipe, overrides)


def check_tasks(tasks: Sequence[str], data_dir: str | None) -> None:
    """Raise ValueError or FileNotFoundError if a task of `evaluate` has no data."""
    if tasks:
        read_tasks(tasks, data_dir)


def load_encoder(name: str, **settings: Any) -> Any:
    """Load a SentenceTransformer."""
    return rt.load_encoder(name, **settings)


def read_lists(path: str, on_error: str) -> list[list[str]]:
    """Read the lists of sentences that `generate` wrote."""
    return list_table(path, on_error=on_error)[0]["sentences"][:]
