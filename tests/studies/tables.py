"""Tables of runs, as the job `sweep` makes them of its recipe."""

from __future__ import annotations

from raoe_train.cli import load
from raoe_train.studies.runs import expand, preparations

WORDS = ("data_dir", "model", "output")
OF_RUNS = ("base", "settings", "seeds", "tasks", "overwrite")


def words(asked):
    return {key: getattr(asked, key) for key in WORDS}


def runs_of(recipe=None, overrides=None):
    asked = load("sweep", recipe, overrides)
    return expand(asked.variants, words(asked), **{key: getattr(asked, key) for key in OF_RUNS})


def prepared_for(recipe=None, overrides=None):
    """{name: (job, recipe, keys)} of what all its runs need."""
    asked = load("sweep", recipe, overrides)
    return preparations(asked.prepare, words(asked), runs_of(recipe, overrides))
