"""The cells of a study: its training runs, and the jobs that prepare their data."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).with_name("recipes")
# The keys of a study and their defaults; docs/reproduce.md explains them.
DEFAULTS: dict[str, Any] = {
    "base": None, "settings": {}, "variants": {}, "seeds": [42], "tasks": [], "prepare": {}, "scales": {},
    "compare": [], "only": [], "measure": False, "keep_models": False,
}  # fmt: skip
# Keys of a variant that are not overrides of the training recipe.
SPECIAL = ("base", "seeds", "grid", "after", "random_weights")
DATA = re.compile(r"\{data_dir\}/([\w/-]+)(?![\w./-])")  # a data file without its ending
FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # PyYAML reads 1e-3 as a string
Preparation = tuple[str, "str | None", dict[str, Any]]  # job, recipe, overrides


@dataclass
class Cell:
    """One training run: a recipe of `raoe-train train`, and overrides of its keys."""

    name: str  # unique in its study
    variant: str  # the row of the report: the family and a point of its grid
    family: str  # the variant's name in the study's recipe
    seed: int
    recipe: str | None
    overrides: dict[str, Any]  # nested, without `output`
    point: dict[str, Any]  # {dotted key: value} of the variant's grid
    after: Cell | None  # the cell whose encoder this one starts from
    random: bool  # whether it starts from random weights, drawn with `seed`, in the architecture of model.name
    run: str  # name of the run's folder; cells with equal settings share the run of the first one


def read_study(study: str | Path, changes: Mapping[str, Any] | None = None, scale: str | None = None) -> dict[str, Any]:
    """Read a study by its shipped name or its path, with `changes` (nested or dotted keys) on top.

    A scale's `settings` and `variants` ({shell pattern: changes}) are applied on top of the variants, its `prepare`
    on top of the study's, and its `base`, `tasks` and `only` replace those of the study.
    """
    path = RECIPES / f"{study}.yaml"
    if not path.is_file():
        path = Path(study)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
        raise FileNotFoundError(f"no study {str(study)!r}: name a YAML file, or one of {known}")
    result = nest(numbers(yaml.safe_load(path.read_text(encoding="utf-8"))), deep=False)
    result = merge(result, nest(numbers(changes or {}), deep=False))
    if unknown := result.keys() - DEFAULTS.keys():
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}; a study has {', '.join(DEFAULTS)}")
    # the command line gives a list of one as a word
    result = {key: [value] if isinstance(DEFAULTS[key], list) and not isinstance(value, list) else value
             for key, value in {**DEFAULTS, **result}.items()}  # fmt: skip
    for pair in result["compare"]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(name in result["variants"] for name in pair)):
            raise ValueError(f"compare takes pairs of variants, got {pair!r}")
    if scale is None:
        return result
    if scale not in result["scales"]:
        raise ValueError(f"unknown scale {scale!r}; this study has {', '.join(result['scales']) or 'no scales'}")
    its_keys = dict(result["scales"][scale])
    on_top = {"*": its_keys.pop("settings", {}), **its_keys.pop("variants", {})}
    for pattern, changed in on_top.items():
        names = fnmatch.filter(result["variants"], pattern)
        if not names:
            raise ValueError(f"scales.{scale}.variants.{pattern} matches none of {', '.join(result['variants'])}")
        result["variants"] |= {name: merge(nest(result["variants"][name] or {}), nest(changed)) for name in names}
    more = {name: nest(entry) for name, entry in its_keys.pop("prepare", {}).items()}
    result["prepare"] = merge({name: nest(entry) for name, entry in result["prepare"].items()}, more)
    if unknown := its_keys.keys() - {"base", "tasks", "only"}:
        raise ValueError(f"scales.{scale} has base, settings, variants, prepare, tasks and only, not {sorted(unknown)}")
    return {**result, **its_keys}


def expand(study: Mapping[str, Any], words: Mapping[str, str | None]) -> list[Cell]:
    """List every cell of a study; a cell comes after the one that it starts from.

    Args:
        study: what read_study returns.
        words: values of data_dir, model and output, which replace {data_dir} and the like in every text.
    """
    if not study["variants"]:
        raise ValueError("variants is empty: name at least one, {} if it changes nothing")
    shared: dict[str, Any] = {"evaluation": {"tasks": study["tasks"]}}
    for word, section, key in (("data_dir", "data", "dir"), ("model", "model", "name")):
        if words[word]:
            shared[section] = {key: words[word]}
    shared = merge(shared, nest(study["settings"]))
    cells: dict[str, Cell] = {}
    first_with: dict[str, Cell] = {}  # the first cell of each run
    starts: set[str] = set()
    for family, variant in study["variants"].items():
        changes = fill(merge(shared, nest(variant or {})), words)
        base, seeds, grid, after, random = (changes.pop(key, None) for key in SPECIAL)
        axes = dict(_axes(grid or {}))
        for values, seed in itertools.product(itertools.product(*axes.values()), seeds or study["seeds"]):
            point = dict(zip(axes, values, strict=True))
            row = "-".join([family, *(f"{key.rpartition('.')[2]}-{_short(value)}" for key, value in point.items())])
            name = f"{row}-seed{seed}"
            if not name.isprintable() or "/" in name or "\\" in name:
                raise ValueError(f"variant {family!r} cannot name a folder: it must be one line without / and \\")
            start = _start(family, after, seed, cells) if after is not None else None
            overrides = merge(merge(changes, nest(point)), {"training": {"seed": seed}})
            cell = Cell(name, row, family, seed, base or study["base"], overrides, point, start, bool(random), name)
            first = first_with.setdefault(json.dumps([cell.recipe, overrides, cell.random, start and start.run]), cell)
            if first is cell:
                # The starting encoder is evaluated once for all cells that share it.
                drawn = seed if cell.random else None
                key = json.dumps([cell.recipe, overrides.get("model"), overrides["evaluation"], drawn])
                before = start is None and key not in starts
                starts.add(key)
                cell.overrides = merge(overrides, {"evaluation": {"before": before}})
            else:
                cell.overrides, cell.run = first.overrides, first.run
            cells[name] = cell
    return list(cells.values())


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Select the cells that match a shell pattern (all without patterns), and those that they start from."""

    def matches(cell: Cell, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in (cell.family, cell.variant, cell.name))

    for pattern in only:
        if not any(matches(cell, pattern) for cell in cells):
            families = ", ".join(dict.fromkeys(cell.family for cell in cells))
            raise ValueError(f"--only {pattern} matches no cell; variants: {families}")
    names = {cell.name for cell in cells if not only or any(matches(cell, pattern) for pattern in only)}
    for cell in reversed(cells):
        if cell.name in names and cell.after is not None:
            names.add(cell.after.name)
    return [cell for cell in cells if cell.name in names]


def preparations(
    study: Mapping[str, Any], words: Mapping[str, str | None], cells: Sequence[Cell]
) -> dict[str, Preparation]:
    """List the jobs of `prepare` whose output one of these cells, or another job in the list, reads."""
    result: dict[str, Preparation] = {}
    texts = [json.dumps(cell.overrides) for cell in cells]
    for name, entry in reversed(study["prepare"].items()):
        overrides = fill(nest(entry), words)
        job, recipe = overrides.pop("job", None), overrides.pop("recipe", None)
        if job is None or "output" not in overrides:
            raise ValueError(f"prepare.{name} needs a job and an output, got {entry!r}")
        if (own := Path(__file__).with_name(f"{recipe}.yaml")).is_file():  # a recipe of the studies
            recipe = str(own)
        if any(overrides["output"] in text for text in texts):
            result[name] = job, recipe, overrides
            texts.append(json.dumps(overrides))
    return dict(reversed(result.items()))


def fill(values: Any, words: Mapping[str, str | None]) -> Any:
    """Replace {data_dir} and the like in every text of nested values, and {data_dir}/NAME by the file NAME.* there."""
    if isinstance(values, Mapping):
        return {key: fill(value, words) for key, value in values.items()}
    if isinstance(values, list):
        return [fill(value, words) for value in values]
    if isinstance(values, str) and (folder := words.get("data_dir")):
        values = DATA.sub(lambda match: _data_file(folder, match[1]), values)
    for word, meaning in words.items() if isinstance(values, str) else ():
        if f"{{{word}}}" in values:
            if meaning is None:
                raise ValueError(f"--{word} is missing: {values!r} needs it")
            values = values.replace(f"{{{word}}}", meaning)
    return values


def _data_file(folder: str, name: str) -> str:
    """FOLDER/NAME.*, if there is one such file, else the name that `raoe-train prepare` gives it."""
    found = [*Path(folder).expanduser().glob(f"{name}.*[!n]")]  # but not .json, which is beside a file
    return str(found[0]) if len(found) == 1 else f"{folder}/{name}.jsonl.gz"


def texts_of(values: Any) -> Iterator[str]:
    """All texts in nested values."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, (Mapping, list)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from texts_of(value)


def nest(values: Mapping[str, Any], deep: bool = True) -> dict[str, Any]:
    """Turn dotted keys into nested mappings: ``{"data.dev": "x"}`` into ``{"data": {"dev": "x"}}``."""
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        value = nest(value) if deep and isinstance(value, Mapping) else value
        for key in reversed(dotted.split(".")):
            value = {key: value}
        nested = merge(nested, value)
    return nested


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `values`, mappings key by key."""
    merged = dict(values)
    for key, value in changes.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def numbers(values: Any) -> Any:
    """Read texts such as 1e-3, which YAML leaves as they are, as numbers."""
    if isinstance(values, Mapping):
        return {str(key): numbers(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [numbers(value) for value in values]
    return float(values) if isinstance(values, str) and FLOAT.fullmatch(values) else values


def _start(family: str, after: str, seed: int, cells: Mapping[str, Cell]) -> Cell:
    """The cell of `after` with the same seed, or its only cell."""
    candidates = [cell for cell in cells.values() if cell.family == after]
    if not candidates:
        above = ", ".join(dict.fromkeys(cell.family for cell in cells.values())) or "none"
        raise ValueError(f"variant {family!r} comes after {after!r}, which is not among the variants above it: {above}")
    same = [cell for cell in candidates if cell.name == f"{after}-seed{seed}"]
    if len(candidates) > 1 and not same:
        raise ValueError(f"variant {family!r} comes after {after!r}, which has no single run with seed {seed}")
    return (same or candidates)[0]


def _axes(grid: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, list[Any]]]:
    """(dotted key, values) of a grid."""
    for key, value in grid.items():
        if isinstance(value, Mapping):
            yield from _axes(value, f"{where}{key}.")
        elif isinstance(value, list) and value:
            yield where + key, value
        else:
            raise ValueError(f"grid.{where}{key} must be a list of values, got {value!r}")


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "_", text)
