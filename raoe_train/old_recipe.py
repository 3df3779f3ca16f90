"""How a recipe becomes a job's configuration, and back.

A recipe is a YAML file: a path, or the name of one shipped in ``raoe_train/recipes`` (those of the job `sweep`, tables
of recipes, in ``raoe_train/studies/recipes``). It may say ``extends: NAME``.
On top of it come overrides (from the command line or from Python), as nested mappings or as dotted keys. Unknown keys
are errors that suggest the nearest known one, and every value is brought to the type that its dataclass declares, so
that ``5e-5``, which YAML reads as a string, is a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raoe_train.config import JOBS, TRAINING_NAMES

RECIPES = Path(__file__).with_name("recipes")
TABLES = Path(__file__).parent / "studies" / "recipes"


def load(job: str, recipe: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Any:
    """The configuration of `job`: its defaults, then the recipe, then `overrides` (nested or dotted keys).

    Raises:
        ValueError: unknown job, key or recipe, or a value of the wrong type.
        FileNotFoundError: a recipe given as a path that is not there.
    """
    if job not in JOBS:
        raise ValueError(f"unknown job {job!r}{_nearest(job, JOBS)}; jobs: {', '.join(JOBS)}")
    values = read_recipe(recipe, job) if recipe is not None else {}
    return build(JOBS[job], merge(values, nest(overrides or {})))


def read_recipe(recipe: str | Path, job: str, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping that a job's recipe stands for, its ``extends`` chain merged in."""
    import yaml

    path = recipe_path(recipe, job, beside=_seen[-1].parent if _seen else None)
    if path in _seen:
        raise ValueError(f"recipe {path} extends itself")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {path} must be a mapping, got {type(values).__name__}")
    parent = values.pop("extends", None)
    values = nest(values)
    return merge(read_recipe(parent, job, (*_seen, path)), values) if parent is not None else values


def shipped(job: str) -> dict[str, Path]:
    """{name: file} of the recipes that come with us, for a job."""
    folder = TABLES if job == "sweep" else RECIPES
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_path(recipe: str | Path, job: str, beside: Path | None = None) -> Path:
    """The file of a job's recipe given as a path or by a shipped name."""
    name, known = str(recipe), shipped(job)
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        for path in (Path(name), *([beside / name] if beside else [])):
            if path.is_file():
                return path.resolve()
        raise FileNotFoundError(f"no such file: {name}")
    raise ValueError(f"no recipe is called {name!r}{_nearest(name, known)}; shipped: {', '.join(known)}")


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings: ``{"loss.name": "mse"}`` is ``{"loss": {"name": "mse"}}``."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        value = nest(value) if isinstance(value, Mapping) else value
        # A key with a path in it (a teacher's name) is one key, dots and all.
        parts = [key] if not isinstance(key, str) or "/" in key else key.split(".")
        for part in reversed(parts):
            value = {part: value}
        nested = merge(nested, value)
    return nested


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes` on top, mappings merged key by key."""
    merged = dict(values)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def build(cls: type, values: Any, where: str = "") -> Any:
    """A `cls` from a mapping of values, each brought to the declared type."""
    if dataclasses.is_dataclass(values) and isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'a recipe'} must be a mapping of keys, got {values!r}")
    types_of = typing.get_type_hints(cls)  # those of class variables, too
    hints = {field.name: types_of[field.name] for field in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            if hasattr(cls, "REST"):
                others[str(key)] = _plain(value)
                continue
            known = [name for name, *_ in keys(cls, where)]
            raise ValueError(f"unknown key {where}{key}{_nearest(where + str(key), known)}")
        arguments[key] = _convert(hints[key], value, where + key)
    if others:
        rest = cls.REST  # type: ignore[attr-defined]
        arguments[rest] = {**arguments.get(rest, {}), **others}
    config = cls(**arguments)
    if "training" in hints:
        config.training = {TRAINING_NAMES.get(k, k): _plain(v) for k, v in config.training.items()}
    return config


def keys(cls: type, where: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """(dotted key, type, default, help) of every key of a configuration."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], f"{where}{field.name}.")
        else:
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            yield where + field.name, hints[field.name], default, field.metadata["help"]


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved configuration as plain values, as written to ``recipe.yaml``."""
    return dataclasses.asdict(config)


def _convert(hint: Any, value: Any, key: str) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        return _convert(options[0], value, key)
    if hint is Any:
        return _plain(value)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), {} if value is None else value, key + ".")
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is list:
        items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        return [_convert(arguments[0], item, key) for item in items]
    if origin is dict:
        if isinstance(value, (list, str)):  # from the command line: name=value ...
            pairs = [value] if isinstance(value, str) else value
            if not all(isinstance(pair, str) and "=" in pair for pair in pairs):
                raise ValueError(f"{key} takes NAME=VALUE, got {value!r}")
            value = dict(pair.split("=", 1) for pair in pairs)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{key} must be a mapping, got {value!r}")
        return {str(k): _convert(arguments[1], v, f"{key}.{k}") for k, v in (value or {}).items()}
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return _scalar(origin, value, key)


def _scalar(kind: type, value: Any, key: str) -> Any:
    problem = ValueError(f"{key} must be {_article(kind)}, got {value!r}")
    if kind is str:
        if isinstance(value, (str, Path)) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return str(value)
        raise problem
    if kind is bool:
        word = str(value).lower()
        if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            raise problem
        return word in ("true", "yes", "on", "1")
    if isinstance(value, bool) or value is None:
        raise problem
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise problem from None
    if kind is int:
        if not number.is_integer():
            raise problem
        return int(value) if not isinstance(value, str) or re.fullmatch(r"[-+]?\d+", value) else int(number)
    return number


def _plain(value: Any) -> Any:
    """An untyped value: words for numbers, truth and nothing become those; lists of one stay lists."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(value.lower())
    for pattern, kind in ((r"[-+]?\d+", int), (r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", float)):
        if re.fullmatch(pattern, value):
            return kind(value)
    return value


def _article(kind: type) -> str:
    return {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[kind]


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, [str(name) for name in known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
