"""Settings of jobs: dataclasses that are filled from recipe files, the command line and Python alike.

jsonargparse does the work: it reads the types and the help from the dataclasses and their docstrings. A job has one
configuration class; `parse` makes one object of it, once, and the job passes that on. Layers, later ones first in
force: command line (or keywords from Python), `--config` files, the recipe, defaults.
"""

import dataclasses
import difflib
import importlib
import inspect
import json
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    PositiveInt = int
    NonNegativeInt = int
    AtLeast2 = int
    Seed = int
    PositiveFloat = float
    NonNegativeFloat = float
    Share = float
    Cosine = float
    ZeroToOne = float
    AboveZeroToOne = float
else:
    from jsonargparse.typing import ClosedUnitInterval as ZeroToOne
    from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

    PositiveFloat = restricted_number_type("PositiveFiniteFloat", float, [(">", 0), ("<", math.inf)])
    NonNegativeFloat = restricted_number_type("NonNegativeFiniteFloat", float, [(">=", 0), ("<", math.inf)])
    AtLeast2 = restricted_number_type("AtLeast2", int, (">=", 2))
    Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
    Share = restricted_number_type("Share", float, [(">=", 0), ("<", 1)])
    AboveZeroToOne = restricted_number_type("AboveZeroToOne", float, [(">", 0), ("<=", 1)])
    Cosine = restricted_number_type("Cosine", float, [(">=", -1), ("<", 1)])

__all__ = [
    "AboveZeroToOne",
    "AtLeast2",
    "Choice",
    "Cosine",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Seed",
    "Share",
    "ZeroToOne",
    "build",
    "make",
    "nearest",
    "parse",
    "parser_of",
    "recipe_path",
    "shipped",
    "to_dict",
]

T = TypeVar("T")


@dataclasses.dataclass
class Choice:
    """A class and the keywords that it is made with, as recipes say it."""

    class_path: str
    init_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def chosen(self) -> Any:
        """The class."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)


RECIPES = Path(__file__).with_name("recipes")
OTHERS = "others"  # a field that collects keys which a section declares beside its own fields


def shipped() -> dict[str, Path]:
    """{name: file} of the recipes that the package brings."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def recipe_path(recipe: str | Path) -> Path:
    """The file of a recipe given as a path or by the name of a shipped one."""
    name, known = str(recipe), shipped()
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        if not Path(name).expanduser().is_file():
            raise FileNotFoundError(f"no such file: {name}")
        return Path(name).expanduser()
    raise ValueError(f"no recipe is called {name!r}{nearest(name, known)}; shipped: {', '.join(known)}")


def nearest(word: str, known: Iterable[Any]) -> str:
    """ " (did you mean WORD?)" for the nearest of the known words, or nothing."""
    section, dot, key = word.rpartition(".")
    names = [str(name) for name in known]
    close = [name for name in names if dot and key and name.startswith(section + dot) and key.rstrip("s") in name]
    close = close[:1] or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def parser_of(config: type, prog: str = "", description: str = "") -> "ArgumentParser":
    """The parser of a configuration class. A class method `declare(parser)` of it may add arguments of its own; its
    attribute `first_words` comes before all that is parsed."""
    import jsonargparse

    class Formatter(jsonargparse.DefaultHelpFormatter):
        """Leaves the description as it is written."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return text

    parser = jsonargparse.ArgumentParser(
        prog=prog, description=description, usage=f"{prog} [RECIPE] [--config FILE] [--section.key VALUE ...]",
        exit_on_error=False, formatter_class=Formatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--config", action="config", help="YAML file of settings; several are layers")
    if hasattr(config, "declare"):
        config.declare(parser)
    else:
        parser.add_class_arguments(config, as_group=True)
    return parser


def parse(
    config: type[T], recipe: str | Path | None = None, settings: Mapping[str, Any] | None = None, prog: str = ""
) -> T:
    """An object of a configuration class.

    Args:
        config: a dataclass; its fields are the keys, those of fields that are dataclasses are SECTION.KEY.
        recipe: a YAML file, or the name of a shipped one.
        settings: on top of it, nested (``{"model": {"name": "x"}}``) or dotted (``{"model.name": "x"}``). A value may
            be a list of words, as the command line has them.

    Raises:
        ValueError: an unknown key or recipe, or a value of another type than is declared.
        FileNotFoundError: a path without a file.
    """
    kinds = dict(_kinds(config))
    layers = _layer(recipe, kinds) if recipe is not None else []
    return parse_words(config, [*layers, *_option_words(dict(_options(settings or {}, kinds)), kinds)], prog)


def parse_words(config: type[T], words: Sequence[str], prog: str = "", description: str = "") -> T:
    """As parse, of the words ``--key=value`` that are left of a command line."""
    from jsonargparse import ArgumentError

    parser = parser_of(config, prog, description)
    try:
        found = parser.parse_args([*getattr(config, "first_words", ()), *words])
    except (ArgumentError, RecursionError) as error:
        raise ValueError(_explained(error, {each.dest: each for each in parser._actions})) from None
    return build(config, {key: value for key, value in found.as_dict().items() if key != "config"})


def words_of(config: type, words: Sequence[str]) -> list[str]:
    """``--key value …`` of a command line as ``--key=value``: no value is true, several are a list, and NAME=VALUE … a
    mapping. ValueError for a key that is given twice."""
    kinds, given = dict(_kinds(config)), dict[str, list[str]]()
    layers: list[str] = []
    flags = [word for word in words if word.startswith("--print_")]
    key = ""
    for word in (word for word in words if word not in flags):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if key in given and key != "config":
                raise ValueError(f"--{key} is given twice; list several values after one: --{key} A B")
            given[key] = [value] if equals else []
        elif not key:
            raise ValueError(f"expected --section.key, got {word!r}")
        else:
            given[key].append(word)
        if key == "config" and given[key]:
            layers += _layer(given.pop(key)[0], kinds)
            key = ""
    texts = {name: _words(name, values, kinds.get(name)) for name, values in given.items()}
    return [*layers, *_option_words(texts, kinds), *flags]


def make(section: type[T], key: str, /, **settings: Any) -> T:
    """An object of a dataclass, its values checked as those of a recipe; messages put `key` before its keys."""
    return getattr(parse(dataclasses.make_dataclass("Made", [(key, section)]), settings={key: settings}), key)


def build(of: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass, those in it too, of nested plain values; keys that it does not have go to its field `others`."""
    hints = typing.get_type_hints(of)
    made: dict[str, Any] = {}
    for name, value in values.items():
        section = _dataclass_in(hints.get(name))
        if section and not isinstance(value, Mapping) and not (value is None and hints[name] is not section):
            raise ValueError(f"{name} is a section of settings, got {value!r:.200}")
        made[name] = build(section, value) if section and isinstance(value, Mapping) else _plain(value)
    if OTHERS in hints:
        made = {**{name: made.pop(name) for name in [*made] if name in hints and name != OTHERS}, OTHERS: made}
    return of(**made)


def to_dict(value: Any) -> Any:
    """A configuration object, or a section of one, as plain values: a recipe."""
    if not dataclasses.is_dataclass(value):
        return value
    found = {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    others = found.pop(OTHERS, {})
    return {**found, **others}


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and mappings of Python's own types: those of restricted numbers cannot be unpickled."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return value if kind is None else kind(value)


def _dataclass_in(hint: Any) -> Any:
    """The dataclass of a type X or X | None, or None."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def _kinds(config: type, where: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, its type) of all keys."""
    for name, hint in typing.get_type_hints(config).items():
        section = _dataclass_in(hint)
        if section is None or hint is not section:
            yield where + name, hint
        if section is not None:
            yield from _kinds(section, f"{where}{name}.")


def _options(settings: Mapping[str, Any], kinds: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as text) of nested settings."""
    for name, value in settings.items():
        key = f"{where}{name}"
        section = any(known.startswith(f"{key}.") for known in kinds)
        if isinstance(value, Mapping) and section and "class_path" not in value:
            yield from _options(value, kinds, f"{key}.")
        else:
            words = [value] if isinstance(value, (str, Path)) else value
            yield key, "[]" if words == [] else _words(key, words, kinds.get(key))


def _words(key: str, values: Any, kind: Any) -> str:
    """A value, or the words of a command line, as the text of one option."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, (str, Path)) for value in values):
        return json.dumps(values, default=str)
    words = [_home(str(value)) for value in values]
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    lists = [each for each in kinds if typing.get_origin(each) is list]
    if not words and (kind is None or bool in kinds):
        return "true"
    if len(words) != 1 and kind is not None and not any(typing.get_origin(each) in (list, dict) for each in kinds):
        raise ValueError(f"{key} takes one value, got {len(words)}")
    mapping = next((each for each in kinds if typing.get_origin(each) is dict), None)
    if mapping and words and all("=" in word for word in words):
        texts = str in typing.get_args(typing.get_args(mapping)[1])  # where a number is a name
        pairs = ((name, value) for name, _, value in (word.partition("=") for word in words))
        quoted = ((name, json.dumps(value) if texts and value != "null" else value) for name, value in pairs)
        return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in quoted) + "}"
    if len(words) == 1 and (not lists or str in kinds or words[0].startswith("[")):
        return words[0]
    numbers = bool(lists) and typing.get_args(lists[0])[0] is not str
    return f"[{', '.join(words)}]" if numbers else json.dumps(words)


def _home(word: str) -> str:
    return str(Path(word).expanduser()) if word.startswith("~/") else word


def _option_words(texts: Mapping[str, str], kinds: Mapping[str, Any]) -> list[str]:
    """Keys and their values as words, classes before their keywords."""
    words = [f"--{key}={text}" for key, text in texts.items()]
    classes = _cleared(texts, kinds)
    return [*classes, *sorted(words, key=lambda word: f"{word[2:].partition('=')[0]}.class_path" not in kinds)]


def _cleared(keys: Iterable[str], kinds: Mapping[str, Any]) -> list[str]:
    """What comes before a class: the parser would keep the keywords that it shares with the class before it."""
    return [f"--{key}=null" for key in keys if f"{key}.class_path" in kinds]


def _layer(recipe: str | Path, kinds: Mapping[str, Any]) -> list[str]:
    """A recipe as words; ValueError where it is no mapping."""
    import yaml

    path = recipe_path(recipe)
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(values or {}, dict):
        raise ValueError(f"recipe {path} must be a mapping of settings, got {type(values).__name__}")
    classes = (
        key
        for key, value in (values or {}).items()
        if isinstance(value, str) or (isinstance(value, dict) and "class_path" in value)
    )
    return [*_cleared(classes, kinds), f"--config={text if values else '{}'}"]


VALUE = re.compile(
    r"val='(.*?)'\)|(?:Given|Got) value: (?!NestedArg)(.*?)(?: - | Given|$)|: ([^:]*) does not conform|"
    r"(?:base 10|to float): '([^']*)'"
)
PROBLEM = re.compile(
    r"Problem with given class_path '([\w.]+)': (?:Option '(\w+)' is not|Parser key \"([\w.]+)\": )(.*)"
)


def _explained(error: Exception, known: Mapping[str, Any]) -> str:
    """What jsonargparse says, in one line that begins with the key; `known` are a parser's arguments by key."""
    said = " ".join(str(error).split())
    if isinstance(error, RecursionError):
        return "a setting refers to itself: recursive YAML alias"
    for start in ("unrecognized arguments: --", "Option '"):
        if said.startswith(start):
            key = said.removeprefix(start).partition("'" if start[-1] == "'" else " ")[0].partition("=")[0]
            return f"unknown key {key}{nearest(key, known)}"
    if not said.startswith('Parser key "'):
        return said
    key, _, rest = said.removeprefix('Parser key "').partition('":')
    hint = getattr(known.get(key), "_typehint", None)
    unknown = rest.partition("Expected a dot import path string: ")[2].partition(" ")[0]
    if "Unable to load config" in rest or dataclasses.is_dataclass(hint) or (unknown and _dataclass_in(hint)):
        return f"{key} is a section: set --{key}.KEY VALUE, or name a file of it"
    if unknown and hint:
        names = sorted(name for base in (hint, *typing.get_args(hint)) for name in _subclasses(base))
        return f"{key} must be the name of a class, got {unknown}{nearest(unknown, names)}: {', '.join(names)}"
    while problem := PROBLEM.search(rest):
        path, option, inner, rest = problem.groups()
        keywords = _keywords(Choice(path).chosen)
        if option:
            name = path.rpartition(".")[2]
            return f"unknown key {key}.{option}{nearest(option, keywords)}: {name} has {', '.join(keywords)}"
        key, hint = f"{key}.{inner}", keywords.get(inner)
    value = VALUE.search(rest)
    if hint is None or value is None:
        return f"{key}: {rest.strip()}"
    return f"{key} must be {_described(hint)}, got {next(filter(None, value.groups()), '')!r:.200}"


def _keywords(of: type) -> dict[str, Any]:
    """{name: type} of the keywords of a class, with those that it passes on to its bases."""
    found: dict[str, Any] = {}
    for cls in of.__mro__:
        if "__init__" in vars(cls):
            constructor = vars(cls)["__init__"]
            parameters, hints = inspect.signature(constructor).parameters.values(), typing.get_type_hints(constructor)
            named = (each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL))
            found |= {name: hints[name] for name in named if name in hints and name not in ("model", "embed", *found)}
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return found


def _described(hint: Any) -> str:
    """A type in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"{'one of ' * (len(of) > 1)}{', '.join(map(str, of))}"
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return " or ".join(map(_described, of))
    if origin in (list, dict, Sequence) or hint in (list, dict):
        return "a list" if dict not in (origin, hint) else "a mapping, NAME=VALUE ..."
    if hint in words or not inspect.isclass(hint):
        return words.get(hint, str(hint))
    base = next((words[kind] for kind in (int, float) if issubclass(hint, kind)), hint.__name__)
    signs = {operator.gt: "above", operator.ge: "at least", operator.lt: "below", operator.le: "at most"}
    limits = [f"{signs[sign]} {limit:g}" for sign, limit in getattr(hint, "_restrictions", ()) if limit < math.inf]
    return " ".join([base, " and ".join(limits)]).strip()


def _subclasses(base: Any) -> set[str]:
    """The names of a class's subclasses that can be made."""
    direct: list[type] = base.__subclasses__() if inspect.isclass(base) and base is not object else []
    below = (name for each in direct for name in _subclasses(each))
    return {*below, *(each.__name__ for each in direct if not inspect.isabstract(each))}
