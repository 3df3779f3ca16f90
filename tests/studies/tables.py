"""Tables of runs, as the job `sweep` makes them of its recipe."""

from __future__ import annotations

from raoe_train.cli import load
from raoe_train.studies.runs import at_scale, chosen, expand, preparations

WORDS = ("data_dir", "model", "output")
OF_RUNS = ("base", "settings", "seeds", "overwrite")


def words(asked):
    return {key: getattr(asked, key) for key in WORDS}


def runs_of(recipe=None, overrides=None):
    asked = load("sweep", recipe, overrides)
    over, _, tasks, _ = at_scale(asked.scale, asked.scales, asked.prepare, asked.tasks, asked.only)
    of_runs = {key: getattr(asked, key) for key in OF_RUNS}
    return expand(asked.variants, words(asked), over=over, tasks=tasks, **of_runs)


def prepared_for(recipe=None, overrides=None):
    """{name: (job, recipe, keys)} of what all its runs need."""
    asked = load("sweep", recipe, overrides)
    _, prepare, _, only = at_scale(asked.scale, asked.scales, asked.prepare, asked.tasks, asked.only)
    return preparations(prepare, words(asked), chosen(runs_of(recipe, overrides), only))
