"""Tables of runs, as the job `sweep` makes them of its recipe."""

from __future__ import annotations

from raoe_train.cli import load
from raoe_train.studies.runs import OF_RUNS, at_scale, chosen, expand, preparations


def _sized(recipe, overrides):
    asked = vars(load("sweep", recipe, overrides))
    return at_scale(asked), {key: asked[key] for key in ("data_dir", "model", "output")}


def runs_of(recipe=None, overrides=None):
    """Its runs, those too that `only` leaves out."""
    sized, words = _sized(recipe, overrides)
    return expand(words=words, **{key: sized[key] for key in OF_RUNS})


def chosen_of(recipe=None, overrides=None):
    return chosen(runs_of(recipe, overrides), _sized(recipe, overrides)[0]["only"])


def prepared_for(recipe=None, overrides=None):
    """{name: (job, recipe, keys)} of what all its runs need."""
    sized, words = _sized(recipe, overrides)
    return preparations(sized["prepare"], words, chosen_of(recipe, overrides))
