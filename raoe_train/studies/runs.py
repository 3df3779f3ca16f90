"""The runs of a sweep, the cells of its table, and what has to be made before them."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raoe_train.artifacts.provenance import digest
from raoe_train.cli import job_of, load
from raoe_train.recipe import arguments, merge, nest, read_recipe, to_dict

# Keys of a variant that are not changes to the training recipe.
SPECIAL = ("base", "seeds", "grid", "after")
OF_RUNS = ("variants", "base", "settings", "over", "seeds", "tasks", "overwrite")  # what `expand` takes of `at_scale`


@dataclass
class Run:
    """One cell of the table. Its directory is OUTPUT/runs/name, or that of the first run with the same settings."""

    name: str  # of the cell, unique
    variant: str  # name of the row, the point of its grid included
    family: str  # name of the variant in the sweep's recipe
    seed: int
    arguments: Any  # of the job `train`; their output is the run's directory
    point: dict[str, Any]  # {dotted key: value} of the variant's grid
    after: Run | None  # whose encoder this one starts from

    @property
    def directory(self) -> Path:
        return Path(str(self.arguments.output))


def expand(
    variants: Mapping[str, Any],
    words: Mapping[str, str | None],
    *,
    base: str,
    settings: Mapping[str, Any],
    over: Mapping[str, Any],
    seeds: Sequence[int],
    tasks: Sequence[str],
    overwrite: bool,
) -> list[Run]:
    """Every run of the table, a run after those it builds on.

    `words` are the sweep's data_dir, model and output, which any text may speak of; `over`, {shell pattern: changes},
    is on top of the variants that it matches; for the others see sweep.
    """
    if not variants:
        raise ValueError("variants is empty: name at least one, {} if it changes nothing")
    # What they start from is evaluated once for all runs.
    shared: dict[str, Any] = {"evaluation": {"tasks": list(tasks), "before": False}}
    for word, section, key in (("data_dir", "data", "dir"), ("model", "model", "name")):
        if words[word]:
            shared[section] = {key: words[word]}
    shared = merge(shared, settings)
    runs: dict[str, Run] = {}
    directories: dict[str, str] = {}
    read = functools.cache(functools.partial(read_recipe, job="train"))
    for family, wish in variants.items():
        changes = merge(shared, nest(wish or {}))
        for pattern, its in over.items():
            if fnmatch.fnmatchcase(family, pattern):
                changes = merge(changes, nest(its))
        changes = _filled(changes, words)
        special = {key: changes.pop(key, None) for key in SPECIAL}
        grid = dict(_leaves(special["grid"] or {}))
        for values, seed in itertools.product(itertools.product(*grid.values()), special["seeds"] or seeds):
            point = dict(zip(grid, values, strict=True))
            variant = "-".join([family, *(f"{key.rpartition('.')[2]}-{_short(value)}" for key, value in point.items())])
            name = f"{variant}-seed{seed}"
            if not name.isprintable() or any(mark in name for mark in "/\\"):
                raise ValueError(f"variants: {variant!r} cannot name a folder: no / and no \\, one line")
            output = str(Path(str(words["output"]), "runs", name))
            fixed: dict[str, Any] = {"training": {"seed": seed}, "output": output, "overwrite": overwrite}
            before = None
            if special["after"] is not None:
                before = _before(family, special["after"], seed, runs)
                fixed["model"] = {"name": str(before.directory)}
            asked = merge(merge(changes, nest(point)), fixed)
            recipe = special["base"] or base
            made = arguments(job_of("train"), merge(read(recipe) if recipe else {}, asked))
            settled = digest({**to_dict(made), "output": None})
            made.output = directories.setdefault(settled, output)
            runs[name] = Run(name, variant, family, seed, made, point, before)
    return list(runs.values())


def at_scale(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a sweep at one of its scales, or as they are, and `over`: what comes on top of its variants."""
    scale, scales = asked["scale"], asked["scales"]
    if scale is None:
        return {**asked, "over": {}}
    if scale not in scales:
        raise ValueError(f"scale must be of {', '.join(scales) or 'none, as this sweep has no scales'}, got {scale!r}")
    its = dict(scales[scale])
    over = {"*": its.pop("settings", {}), **its.pop("variants", {})}
    if strange := [name for name in over if not fnmatch.filter(asked["variants"], name)]:
        raise ValueError(f"scales.{scale}.variants.{strange[0]} is none of {', '.join(asked['variants'])}")
    prepare = merge(nest(asked["prepare"]), nest(its.pop("prepare", {})))
    own = {key: its.pop(key, asked[key]) for key in ("base", "tasks", "only")}
    if its:
        known = "base, settings, variants, prepare, tasks and only"
        raise ValueError(f"scales.{scale} has {known}, got {', '.join(its)}")
    return {**asked, **own, "over": over, "prepare": prepare, "only": asked["only"] or own["only"]}


def _before(family: str, after: str, seed: int, runs: Mapping[str, Run]) -> Run:
    """The run of `after` that a run of `family` goes on from: that of the same seed, or the only one there is."""
    others = [run for run in runs.values() if run.family == after]
    if not others:
        above = ", ".join(dict.fromkeys(run.family for run in runs.values())) or "nothing"
        raise ValueError(f"variant {family!r} comes after {after!r}, which is none of those above it: {above}")
    found = others[0] if len(others) == 1 else runs.get(f"{after}-seed{seed}")
    if found is None:
        raise ValueError(f"variant {family!r} comes after {after!r}, which has no run of seed {seed} alone")
    return found


def chosen(runs: Sequence[Run], only: Sequence[str]) -> list[Run]:
    """The runs that match one of the shell patterns, all where there are none, with those that they build on."""

    def matches(run: Run, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (run.family, run.variant, run.name))

    for pattern in only:
        if not any(matches(run, pattern) for run in runs):
            families = dict.fromkeys(run.family for run in runs)
            raise ValueError(f"--only {pattern}: no such run; variants: {', '.join(families)}")
    wanted = {run.name for run in runs if not only or any(matches(run, pattern) for pattern in only)}
    for run in reversed(runs):
        if run.name in wanted and run.after is not None:
            wanted.add(run.after.name)
    return [run for run in runs if run.name in wanted]


def preparations(
    prepare: Mapping[str, Any], words: Mapping[str, str | None], runs: Sequence[Run]
) -> dict[str, tuple[str, str | None, dict[str, Any]]]:
    """{name: (job, recipe, keys)} of what has to be there before these runs: what they, or another one that has to be
    there, speak of the output of."""
    found: dict[str, tuple[str, str | None, dict[str, Any]]] = {}
    spoken_of = [json.dumps(to_dict(run.arguments)) for run in runs]
    for name, wish in reversed([*prepare.items()]):
        values = _filled(nest(wish), words)
        job, recipe = values.pop("job", None), values.pop("recipe", None)
        if job is None or "output" not in values:
            raise ValueError(f"prepare.{name} must say a job and its output, got {wish!r}")
        load(job, recipe, values)  # what it cannot be is found now
        if any(str(values["output"]) in text for text in spoken_of):
            found[name] = job, recipe, values
            spoken_of.append(json.dumps(values))
    return dict(reversed(found.items()))


def _filled(values: Any, words: Mapping[str, str | None]) -> Any:
    """`values` with {data_dir} and the like replaced in every text."""
    if isinstance(values, Mapping):
        return {key: _filled(value, words) for key, value in values.items()}
    if isinstance(values, list):
        return [_filled(value, words) for value in values]
    if isinstance(values, str):
        for word, meaning in words.items():
            if "{" + word + "}" in values:
                if meaning is None:
                    raise ValueError(f"--{word} is missing: {values!r} needs it")
                values = values.replace("{" + word + "}", meaning)
    return values


def _leaves(grid: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, list[Any]]]:
    """(dotted key, values) of a grid."""
    for key, value in grid.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{where}{key}.")
        elif isinstance(value, list) and value:
            yield where + key, value
        else:
            raise ValueError(f"grid.{where}{key} must be a list of values, got {value!r}")


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "_", text)
