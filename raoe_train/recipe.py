"""How a recipe becomes the arguments of a job.

A job is a function: its parameters are the keys of its recipe. A parameter's type is `Annotated[T, "help"]`, or
`Annotated[T, Option(…)]`; one whose T is a dataclass is a section, whose fields are declared in the same way.

A recipe is a YAML file, by its path or by the name of one that is shipped. It may say ``extends: NAME``. On top of it
come overrides, as nested mappings or as dotted keys. Unknown keys are errors that suggest the nearest known one, and
every value is brought to the type that is declared, so that ``5e-5``, which YAML reads as a string, is a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import operator
import os
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECIPES = Path(__file__).with_name("recipes")
BARE = ""  # in a section, the key of a bare word that stood in its place in another layer
PATTERNS = "learning_rate_mapping"  # a mapping whose keys are patterns of names, dots and all
UNDER = "under another name"  # in a section whose name a later layer changed: what the layers before it said


@dataclasses.dataclass(frozen=True)
class Option:
    """What is said of a parameter, beside its type."""

    help: str = ""  # a line for the command line's help
    # what a number has to be; none of them: any number
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    word: str | None = None  # of a section, the key that a bare word in its place stands for
    # functions as MODULE:NAME, imported when asked for
    convert: str | None = None  # (value, key) -> argument, in place of bringing it to the type
    keys: str | None = None  # (where) -> what the function keys lists in its place
    live: bool = False  # whether an object that is no mapping is taken as it is
    writes: str | None = None  # "file" or "folder" where the value is a path to write to, which is looked at first


class Parameter(typing.NamedTuple):
    """A parameter of a job, or a field of a section."""

    type: Any
    default: Any
    option: Option


@functools.cache
def parameters(of: Callable[..., Any] | type) -> dict[str, Parameter]:
    """The parameters of a job, or the fields of a section, by name."""
    hints = typing.get_type_hints(of, include_extras=True)
    if dataclasses.is_dataclass(of):
        defaults = {field.name: _default(field) for field in dataclasses.fields(of)}
    else:
        defaults = {name: given.default for name, given in inspect.signature(of).parameters.items()}
    return {name: declared(hints[name], default) for name, default in defaults.items()}


def declared(hint: Any, default: Any) -> Parameter:
    """What an annotation says of a parameter."""
    if typing.get_origin(hint) is typing.Union:  # Python 3.10 makes an Optional of it where the default is None
        hint = next((each for each in typing.get_args(hint) if typing.get_origin(each) is typing.Annotated), hint)
    if typing.get_origin(hint) is not typing.Annotated:
        return Parameter(hint, default, Option())
    kind, said = typing.get_args(hint)[:2]
    return Parameter(kind, default, Option(said) if isinstance(said, str) else said)


def arguments(job: Callable[..., Any], values: Mapping[str, Any]) -> SimpleNamespace:
    """All arguments of a job, from a mapping of values; ValueError for an unknown key, or a value of the wrong type."""
    return SimpleNamespace(**_build(job, values, ""))


def load(job: Callable[..., Any], recipe: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Any:
    """The arguments of `job`: its defaults, then the recipe, then `overrides` (nested or dotted keys); ValueError for
    an unknown key or recipe, or a value of the wrong type, FileNotFoundError for a path without a file."""
    values = read_recipe(recipe) if recipe is not None else {}
    return arguments(job, merge(values, nest(overrides or {})))


def to_dict(values: Any) -> Any:
    """Arguments, or a section of them, as plain values: a recipe."""
    if isinstance(values, SimpleNamespace):
        return {name: to_dict(value) for name, value in vars(values).items()}
    return dataclasses.asdict(values) if dataclasses.is_dataclass(values) else values  # type: ignore[arg-type]


def keys(of: Callable[..., Any] | type, where: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, help) of every key of a job's recipe."""
    for name, parameter in parameters(of).items():
        if parameter.option.keys is not None:
            yield from pkgutil.resolve_name(parameter.option.keys)(f"{where}{name}.")
        elif dataclasses.is_dataclass(parameter.type):
            yield from keys(parameter.type, f"{where}{name}.")  # type: ignore[arg-type]
        else:
            yield where + name, parameter.default, with_choices(parameter.option.help, parameter)


def with_choices(text: str, parameter: Parameter) -> str:
    """A line of help that says what a number has to be, "… (at least 0 and below 1)", or which words there are."""
    bounds = " and ".join(f"{word} {bound:g}" for word, bound in _bounds(parameter.option).items())
    words = [str(word) for word in choices(parameter.type)]
    listed = "" if all(word in text for word in words) else ", ".join(words)
    said = [each for each in (bounds, listed) if each and each not in text]
    return f"{text} ({'; '.join(said)})" if said else text


def choices(hint: Any) -> tuple[Any, ...]:
    """The words of all Literals in a type."""
    of = typing.get_args(hint)
    return of if typing.get_origin(hint) is typing.Literal else tuple(word for part in of for word in choices(part))


def read_recipe(recipe: str | Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping that a recipe stands for, its ``extends`` chain merged in."""
    path = recipe_path(recipe, beside=_seen[-1].parent if _seen else None)
    if path in _seen:
        raise ValueError(f"recipe {path} extends itself")
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise ValueError(f"recipe {path} must be a mapping, got {type(values).__name__}")
    parent = values.pop("extends", None)
    try:
        values = nest(values)
        json.dumps(values, default=str, skipkeys=True)  # which looks into every list, too
    except (RecursionError, ValueError):
        raise ValueError(f"recipe {path} has a part that holds itself (an alias, *NAME, inside its &NAME)") from None
    return merge(read_recipe(parent, (*_seen, path)), values) if parent is not None else values


def read_yaml(path: Path) -> Any:
    """What a YAML file says; ValueError where that is none."""
    import yaml

    text = path.read_bytes()
    try:
        return yaml.safe_load(text.decode("utf-8-sig"))
    except Exception as error:  # PyYAML's own, or what int, a date or a dict says of a value
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from None


def shipped() -> dict[str, Path]:
    """{name: file} of the shipped recipes."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def recipe_path(recipe: str | Path, beside: Path | None = None) -> Path:
    """The file of a recipe given as a path or by a shipped name."""
    name, known = str(recipe), shipped()
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        for folder in (Path(), beside or Path()):
            if (folder / name).is_file():
                return (folder / name).resolve()
        raise FileNotFoundError(f"no such file: {name}")
    raise ValueError(f"no recipe is called {name!r}{nearest(name, known)}; shipped: {', '.join(known)}")


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings: ``{"loss.name": "mse"}`` is ``{"loss": {"name": "mse"}}``."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        # A key with a path in it (a teacher's name) is one key, dots and all.
        parts = [key] if not isinstance(key, str) or "/" in key else key.split(".")
        if PATTERNS in parts:
            at = parts.index(PATTERNS) + 1
            parts[at:] = [".".join(parts[at:])] if parts[at:] else []
        elif isinstance(value, Mapping):
            value = nest(value)
        for part in reversed(parts):
            value = {part: value}
        nested = merge(nested, value)
    return nested


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes` on top, mappings merged key by key.

    Where `changes` names another loss, what `values` said of theirs goes under UNDER: it holds as far as that loss has
    it, and is no error where not.
    """
    merged = dict(values)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, str):
            merged[key] = {**{name: said for name, said in old.items() if name != BARE}, BARE: value}
        elif isinstance(old, str) and isinstance(value, Mapping):
            merged[key] = {BARE: old, **value}
        elif not (isinstance(old, Mapping) and isinstance(value, Mapping)):
            merged[key] = value
        elif key == "loss" and value.get("name", old.get("name")) != old.get("name"):
            under = {**said_under(old), **old, **said_under(value)}
            merged[key] = {**value, UNDER: {name: under[name] for name in under if name not in ("name", UNDER)}}
        elif key == "loss" and UNDER in value:  # what a layer between them said comes after `values`
            own = {name: said for name, said in old.items() if name not in said_under(value)}
            merged[key] = {**own, **value, UNDER: {**said_under(old), **said_under(value)}}
        else:
            merged[key] = merge(old, value)
    return merged


def said_under(loss: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a recipe's section `loss` has under UNDER; ValueError where that is no mapping."""
    said = loss.get(UNDER) or {}
    if not isinstance(said, Mapping):
        raise ValueError(f"loss.{UNDER} must be a mapping of keys, got {said!r}")
    return said


def nearest(word: str, known: Iterable[Any]) -> str:
    """ " (did you mean WORD?)" for the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, [str(name) for name in known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def convert(hint: Any, value: Any, key: str) -> Any:
    """A value brought to a type. ValueError, with the key, for one that cannot be."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if type(None) in typing.get_args(hint) and str(value).lower() in ("none", "null"):
            return None
        literal = [option for option in options if typing.get_origin(option) is typing.Literal]
        if any(value in typing.get_args(option) for option in literal):
            return value
        others = [option for option in options if option not in literal] or literal
        if len(others) > 1:
            return plain(value)
        try:
            return convert(others[0], value, key)
        except ValueError as error:
            words = [word for option in literal if option not in others for word in typing.get_args(option)]
            also = "".join(f" or {word}" for word in words)
            raise ValueError(str(error).replace(", got ", f"{also}, got ", 1)) from None
    if hint is Any:
        return plain(value)
    if typing.get_origin(hint) is typing.Literal:
        value = "no" if value is False else value  # YAML's no
        if value not in typing.get_args(hint):
            raise ValueError(f"{key} must be one of {', '.join(typing.get_args(hint))}, got {value!r:.200}")
        return value
    if dataclasses.is_dataclass(hint):
        return hint(**_build(hint, value, key + "."))  # type: ignore[operator, arg-type]
    origin, of = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is list:
        items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        return [convert(of[0], item, key) for item in items]
    if origin is dict:
        if isinstance(value, (list, str)):  # from the command line: name=value ...
            pairs = [value] if isinstance(value, str) else value
            if not all(isinstance(pair, str) and "=" in pair for pair in pairs):
                raise ValueError(f"{key} takes NAME=VALUE, got {value!r:.200}")
            value = dict(pair.split("=", 1) for pair in pairs)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{key} must be a mapping, got {value!r:.200}")
        return {str(k): convert(of[1], v, f"{key}.{k}") for k, v in (value or {}).items()}
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return _scalar(origin, value, key)


def plain(value: Any) -> Any:
    """An untyped value: words for numbers, truth and nothing become those; lists of one stay lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(value.lower())
    for pattern, kind in ((r"[-+]?\d+", int), (r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", float)):
        if re.fullmatch(pattern, value):
            return kind(value)
    return value


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _build(of: Any, values: Any, where: str) -> dict[str, Any]:
    """The arguments of a function or a dataclass."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'a recipe'} must be a mapping of keys, got {values!r:.200}")
    known, rest = parameters(of), getattr(of, "REST", "")
    made, others = dict[str, Any](), dict[str, Any]()
    for key, value in values.items():
        if key in known:
            made[key] = argument(known[key], value, where + key)
        elif rest:
            others[str(key)] = plain(value)
        else:
            if why := getattr(of, "GONE", {}).get(key):
                raise ValueError(f"{where}{key} is no choice any more: {why}")
            listed = [name for name, *_ in keys(of, where)]
            raise ValueError(f"unknown key {where}{key}{nearest(where + str(key), listed)}")
    if others:
        made[rest] = {**made.get(rest, {}), **others}
    for name, parameter in known.items():
        if name not in made:
            given = {} if dataclasses.is_dataclass(parameter.type) else parameter.default
            made[name] = argument(parameter, given, where + name) if given is not None else None
    return made


def argument(parameter: Parameter, value: Any, key: str) -> Any:
    """A value as what is declared of its parameter; ValueError, with the key, for one that cannot be."""
    option, kind = parameter.option, parameter.type
    if isinstance(value, Mapping) and BARE in value:
        value = _later(value, option.word)
    if option.convert is not None:
        return pkgutil.resolve_name(option.convert)(value, key)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, kind):  # type: ignore[arg-type]
            for name, each in parameters(type(value)).items():
                _bounded(each.option, getattr(value, name), f"{key}.{name}")
            return value
        if option.live and not isinstance(value, (Mapping, str, bytes, Path, int, float, list, date, type(None))):
            return value
        word = option.word and isinstance(value, (str, Path))
        value = {option.word: value} if word else {} if value is None else value
    return _bounded(option, convert(kind, value, key), key)


HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def _bounded(option: Option, value: Any, key: str) -> Any:
    for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        _bounded(option, each, key)
    for word, bound in _bounds(option).items() if isinstance(value, (int, float)) else ():
        if not HOLDS[word](value, bound):
            raise ValueError(f"{key} must be {word} {bound:g}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be finite, got {value!r}")
    return value


def _bounds(option: Option) -> dict[str, float]:
    """What a number has to be."""
    of = {"at least": option.least, "above": option.above, "at most": option.most, "below": option.below}
    return {word: bound for word, bound in of.items() if bound is not None}


def _later(value: Mapping[str, Any], word: str | None) -> Any:
    """A section's keys and the bare word of another layer as one: the later holds."""
    if word:
        return dict((word if name == BARE else name, each) for name, each in value.items())
    return value[BARE] if next(reversed(dict(value))) == BARE else {k: v for k, v in value.items() if k != BARE}


def _scalar(kind: type, value: Any, key: str) -> Any:
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    problem = ValueError(f"{key} must be {names[kind]}, got {value!r:.200}")
    if kind is str:
        if isinstance(value, (str, Path)) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            # nothing but a path begins so
            return os.path.expanduser(str(value)) if str(value).startswith("~/") else str(value)
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
    except OverflowError:  # an integer of hundreds of digits
        raise ValueError(f"{key} must be a number of 64 bits, got a longer one") from None
    if kind is float:
        return number
    if not number.is_integer():
        raise problem
    if abs(number) >= 2**63:  # as long as libraries take them
        raise ValueError(f"{key} must be an integer of 64 bits, got {number:g}")
    return int(value) if not isinstance(value, str) or re.fullmatch(r"[-+]?\d+", value) else int(number)
