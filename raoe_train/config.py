"""Settings of jobs: dataclasses that are filled from recipe files, the command line or Python.

Each job has one configuration class, of which `parse` creates one object. The settings come in layers, each of which
overrides the layers before it: defaults, the recipe, `--config` files, the command line (or keywords from Python).
jsonargparse then checks the types and writes the help from the dataclasses and their docstrings.
"""

import dataclasses
import difflib
import importlib
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

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
    from jsonargparse.typing import ClosedUnitInterval as ZeroToOne  # noqa: F401 - for others
    from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type  # noqa: F401

    PositiveFloat = restricted_number_type("PositiveFiniteFloat", float, [(">", 0), ("<", math.inf)])
    NonNegativeFloat = restricted_number_type("NonNegativeFiniteFloat", float, [(">=", 0), ("<", math.inf)])
    AtLeast2 = restricted_number_type("AtLeast2", int, (">=", 2))
    Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
    Share = restricted_number_type("Share", float, [(">=", 0), ("<", 1)])
    AboveZeroToOne = restricted_number_type("AboveZeroToOne", float, [(">", 0), ("<=", 1)])
    Cosine = restricted_number_type("Cosine", float, [(">=", -1), ("<", 1)])

T = TypeVar("T")


@dataclasses.dataclass
class Choice:
    """A class and the keywords of its constructor, as recipes name them."""

    class_path: str
    init_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def chosen(self) -> Any:
        """The class."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)


RECIPES = Path(__file__).with_name("recipes")
LIMIT = 100_000  # maximum number of values in a recipe, or in settings from Python
OTHERS = "others"  # name of the field that collects the keys which a section declares beside its own fields


def shipped() -> dict[str, Path]:
    """{name: file} of the recipes that are part of the package."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def recipe_path(recipe: str | Path) -> Path:
    """Return the file of a recipe, which is given as a path or as the name of a shipped recipe."""
    name, recipes = str(recipe), shipped()
    if name in recipes:
        return recipes[name]
    if name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        if not Path(name).expanduser().is_file():
            raise FileNotFoundError(f"no such file: {name}")
        return Path(name).expanduser()
    raise ValueError(f"unknown recipe {name!r}{nearest(name, recipes)}; shipped recipes: {', '.join(recipes)}")


def nearest(word: str, candidates: Iterable[Any]) -> str:
    """ " (did you mean WORD?)" with the most similar known word, or "" if none is similar."""
    section, dot, key = word.rpartition(".")
    names = [str(name) for name in candidates]
    close = [name for name in names if dot and key and name.startswith(section + dot) and key.rstrip("s") in name]
    close = close[:1] or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def parser_of(config: type, prog: str = "", description: str = "") -> "ArgumentParser":
    """Create the parser of a configuration class, whose class method `declare(parser)` may add the arguments."""
    import jsonargparse

    class Formatter(jsonargparse.DefaultHelpFormatter):
        """Keeps line breaks of the description; hides --SECTION FILE, which jsonargparse adds."""

        def add_argument(self, action: Any) -> None:
            if action.help != "Path to a configuration file.":
                super().add_argument(action)

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return text

    parser = jsonargparse.ArgumentParser(
        prog=prog, description=description, usage=f"{prog} [RECIPE] [--config FILE] [--section.key VALUE ...]",
        exit_on_error=False, formatter_class=Formatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--config", action="config", help="YAML file of settings; later files override earlier ones")
    if hasattr(config, "declare"):
        config.declare(parser)
    else:
        parser.add_class_arguments(config, as_group=True)
    return parser


def parse(config: type[T], recipe: str | Path | None = None, settings: Mapping[str, Any] | None = None) -> T:
    """Create an object of a configuration class.

    Args:
        config: a dataclass; its fields are the keys, and a field that is a dataclass is a section (SECTION.KEY).
        recipe: path of a YAML file, or the name of a shipped recipe.
        settings: keys that override the recipe, nested (``{"model": {"name": "x"}}``) or dotted
            (``{"model.name": "x"}``). Strings are parsed as on the command line.

    Raises:
        ValueError: an unknown key or recipe, or a value of the wrong type.
        FileNotFoundError: the recipe's file does not exist.
    """
    return _merged(config, [*([] if recipe is None else [_read(recipe)]), settings or {}])


def parse_words(config: type[T], words: Sequence[str]) -> T:
    """Parse a command line: ``--key value …``, ``--key=value`` and ``--config FILE``. A key without a value is true,
    several values are a list, and NAME=VALUE … is a mapping. ValueError for a key that is given twice."""
    kinds, options, files, key = dict(_kinds(config)), dict[str, list[str]](), list[str](), ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if key in options and key != "config":
                raise ValueError(f"--{key} is given twice; list several values after one flag: --{key} A B")
            options[key] = [value] if equals else []
        elif not key:
            raise ValueError(f"expected --section.key, got {word!r}")
        else:
            options[key].append(word)
        if key == "config" and options[key]:
            files += options.pop(key)
            key = ""
    values = {name: _value(name, texts, kinds.get(name)) for name, texts in options.items()}
    return _merged(config, [*map(_read, files), values])


def _merged(config: type[T], layers: Iterable[Mapping[str, Any]]) -> T:
    """Create the configuration object from layers of nested settings; later layers override earlier ones."""
    from jsonargparse import ArgumentError

    kinds = dict(_kinds(config))
    classes = {key.removesuffix(".class_path") for key in kinds if key.endswith(".class_path")}
    merged: dict[str, Any] = {key: {"class_path": getattr(config(), key).class_path} for key in classes}
    parser = parser_of(config)
    try:
        for layer in layers:
            if "config" in layer:
                raise ValueError("unknown key config: files of settings go on the command line, --config FILE")
            if _size(layer, (), {}) > LIMIT:
                raise ValueError(f"settings have more than {LIMIT:,} values (nested YAML aliases?)")
            # classes before their keywords, because setting a class clears the keywords
            flat = sorted(_flat(layer, kinds), key=lambda item: item[0].removesuffix(".class_path") not in classes)
            for key, value in flat:
                section, _, name = key.partition(".")
                if section in classes:
                    _choose(merged[section], name or "class_path", value)
                elif value is not None and any(other.startswith(f"{key}.") for other in kinds):
                    raise ValueError(f"{key} is a section: set --{key}.KEY VALUE")  # not --SECTION FILE of jsonargparse
                else:
                    _put(merged, key.split("."), value)
        namespace = parser.parse_object(merged)
    except (ArgumentError, RecursionError) as error:
        raise ValueError(_explain(error, kinds, merged, [each.dest for each in parser._actions])) from None
    return build(config, {key: value for key, value in namespace.as_dict().items() if key != "config"})


def _flat(settings: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested settings. A mapping is split if it is a section, but not if it is a value."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in kinds):
            yield from _flat(value, kinds, f"{key}.")
        else:
            value = str(value) if isinstance(value, Path) else value
            single = isinstance(value, str) and not value.startswith("[") and _is_list(kinds.get(key))
            yield key, [value] if single else value


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value at a path in nested values."""
    *sections, name = path
    for section in sections:
        inner = values.get(section) or {}
        if not isinstance(inner, Mapping):
            raise ValueError(f"{section} is a section: set --{section}.KEY VALUE")
        values[section] = values = dict(inner)
    values[name] = value


def _choose(choice: dict[str, Any], name: str, value: Any) -> None:
    """Set the class, which clears its keywords, or set keywords of the class."""
    if name == "class_path":
        choice.clear()
        choice[name] = value
    else:
        extra = value or {} if name == "init_args" else {name.removeprefix("init_args."): value}
        if not isinstance(extra, Mapping):
            raise ValueError(f"{name} is a section of settings, got {value!r:.200}")
        choice["init_args"] = {**choice.get("init_args", {}), **extra}


def make(section: type[T], key: str, /, **settings: Any) -> T:
    """Create an object of a dataclass, with values checked like a recipe's; messages name its keys `key`.KEY."""
    return getattr(parse(dataclasses.make_dataclass("Made", [(key, section)]), None, {key: settings}), key)


def build(of: type[T], values: Mapping[str, Any]) -> T:
    """Create a dataclass, and those nested in it, from plain values; unknown keys go to its field `others`."""
    hints = typing.get_type_hints(of)
    fields: dict[str, Any] = {}
    for name, value in values.items():
        section = _dataclass_in(hints.get(name))
        if section and not isinstance(value, Mapping) and not (value is None and hints[name] is not section):
            raise ValueError(f"{name} is a section of settings, got {value!r:.200}")
        fields[name] = build(section, value) if section and isinstance(value, Mapping) else _plain(value)
    if OTHERS in hints:
        fields = {**{name: fields.pop(name) for name in [*fields] if name in hints and name != OTHERS}, OTHERS: fields}
    return of(**fields)


def to_dict(value: Any) -> Any:
    """Convert a configuration object, or a section of one, to the plain values of a recipe."""
    if not dataclasses.is_dataclass(value):
        return value
    values = {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    others = values.pop(OTHERS, {})
    return {**values, **others}


def recipe_text(config: Any, without: Iterable[str] = ()) -> str:
    """Write a configuration object as a YAML recipe that leaves out the keys in `without`."""
    import yaml

    settings = {key: value for key, value in to_dict(config).items() if key not in without}
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    """Convert values to Python's own types, because objects of the restricted number types cannot be unpickled."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return value if kind is None else kind(value)


def _dataclass_in(hint: Any) -> Any:
    """The dataclass in a type X or X | None; None if there is none."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def _kinds(config: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type) for every key."""
    for name, hint in typing.get_type_hints(config).items():
        section = _dataclass_in(hint)
        if section is None or hint is not section:
            yield prefix + name, hint
        if section is not None:
            yield from _kinds(section, f"{prefix}{name}.")


def _value(key: str, words: list[str], kind: Any) -> Any:
    """Convert the words after a key on the command line to its value."""
    kinds = _union(kind)
    if not words and (kind is None or bool in kinds):
        return True
    words = [str(Path(word).expanduser()) if word.startswith("~/") else word for word in words]
    mapping = next((each for each in kinds if typing.get_origin(each) is dict), None)
    if mapping and words and all("=" in word for word in words):
        texts = str in _union(typing.get_args(mapping)[1])  # then a number is a name, and stays a string
        pairs = ((name, value) for name, _, value in (word.partition("=") for word in words))
        return {name: value if texts and value != "null" else _yaml(value) for name, value in pairs}
    if len(words) == 1 and (not _is_list(kind) or words[0].startswith("[")):
        return words[0]
    if kind is not None and not any(typing.get_origin(each) in (list, dict) for each in kinds):
        raise ValueError(f"{key} must have one value, got {len(words)}")
    return words


def _is_list(kind: Any) -> bool:
    """Whether a text may stand for a list of one."""
    return any(typing.get_origin(each) is list for each in _union(kind)) and str not in _union(kind)


def _union(kind: Any) -> tuple[Any, ...]:
    """The member types of a union, or the type itself."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _read(recipe: str | Path) -> Mapping[str, Any]:
    """Read the settings of a recipe; ValueError if the file is not a mapping."""
    path = recipe_path(recipe)
    try:
        values = _yaml(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(values or {}, dict):
        raise ValueError(f"recipe {path} must be a mapping of settings, got {type(values).__name__}")
    return values or {}


def _size(value: Any, above: tuple[int, ...], counts: dict[int, int]) -> int:
    """Count nested values, those of a YAML alias at each use; ValueError for values that contain themselves."""
    if id(value) in above:
        raise ValueError("a setting refers to itself: recursive YAML alias")
    if isinstance(value, (dict, list)) and id(value) not in counts:
        inner = value.values() if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_size(each, (*above, id(value)), counts) for each in inner)
    return counts.get(id(value), 1)


def _yaml(text: str) -> Any:
    """Parse YAML; ValueError if it is invalid. Texts that YAML 1.1 reads as numbers or dates, but people mean as names
    (007, 1_000, 1:30, 2026-11-26), stay texts."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
            first: [(tag, form) for tag, form in rules if tag.rpartition(":")[2] not in ("int", "timestamp")]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9]\d*)$"), [*"-+0123456789"])
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(error) from None


UNKNOWN = re.compile(r"(?:Group '([\w.]+)' does not accept option|Option) '([^']*)'")
INSIDE = re.compile(
    r"Problem with given class_path '[\w.]*?(\w+)': (?:Option '(\w+)' is not|Parser key \"([\w.]+)\": )(.*)"
)


def _explain(error: Exception, kinds: Mapping[str, Any], settings: Any, keys: Iterable[str]) -> str:
    """Rewrite a message of jsonargparse about settings as one line that begins with the key."""
    message = " ".join(str(error).split())
    if isinstance(error, RecursionError):
        return "a setting refers to itself: recursive YAML alias"
    if unknown := UNKNOWN.match(message):
        key = ".".join(filter(None, unknown.groups()))
        return f"unknown key {key}{nearest(key, keys)}"
    key, _, rest = message.removeprefix('Parser key "').partition('":')
    is_class = f"{key}.class_path" in kinds
    while inside := INSIDE.search(rest):
        name, option, inner, rest = inside.groups()
        key = f"{key}.{option or inner}"
        if option:
            hint = f": --{key.removesuffix(f'.{option}')}.help {name} lists its keywords"
            return f"unknown key {key}{hint if is_class else nearest(key, kinds)}"
    if is_class and (name := rest.partition("dot import path string: ")[2].partition(" ")[0]):
        return f"{key} must be the name of a class, got {name}: --help lists the known classes"
    if key not in kinds:
        return f"{key}: {(rest.partition('Errors: - ')[2] or rest).partition(' - Expected a ')[0].strip()}"
    for part in key.split("."):
        settings = settings[part]
    return f"{key} must be {_describe(kinds[key])}, got {settings!r:.200}"


def _describe(hint: Any) -> str:
    """Describe a type in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"{'one of ' * (len(of) > 1)}{', '.join(map(str, of))}"
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return " or ".join(map(_describe, of))
    if origin in (list, dict, Sequence) or hint in (list, dict):
        if dict in (origin, hint):
            return "a mapping, NAME=VALUE ..."
        return ", each ".join(["a list", *map(_describe, of)])
    if hint in words or not inspect.isclass(hint):
        return words.get(hint, str(hint))
    base = next((words[kind] for kind in (int, float) if issubclass(hint, kind)), hint.__name__)
    signs = {operator.gt: "above", operator.ge: "at least", operator.lt: "below", operator.le: "at most"}
    limits = [f"{signs[sign]} {limit:g}" for sign, limit in getattr(hint, "_restrictions", ()) if limit < math.inf]
    return " ".join([base, " and ".join(limits)]).strip()
