"""Job settings: dataclasses whose values come from recipe files, the command line or Python.

Each job has one configuration class, and `merge` creates an object of this class. Settings are read from the defaults,
then the recipe, then `--config` files, then the command line (or keywords in Python). Later values override earlier
values. The package pydantic converts each value to the type of its field.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import reprlib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

T = TypeVar("T")


def _number(value: Any) -> Any:
    """Reject true and false, because pydantic would read them as the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


def plain(value: Any) -> Any:
    """Parse a string as YAML. Return the value unchanged if it is not a string or not valid YAML, or if it contains a
    mapping or list that is not in brackets (such as "query: ")."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            parsed = read_yaml(value)
            if value.startswith(("[", "{")) or not isinstance(parsed, list | dict):
                return parsed
    return value


NUMBER = BeforeValidator(_number)
PositiveInt = Annotated[int, Field(gt=0), NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), NUMBER]
AtLeast2 = Annotated[int, Field(ge=2), NUMBER]
Seed = Annotated[int, Field(ge=0, lt=2**32), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Share = Annotated[float, Field(ge=0, lt=1), NUMBER]
ZeroToOne = Annotated[float, Field(ge=0, le=1), NUMBER]
AboveZeroToOne = Annotated[float, Field(gt=0, le=1), NUMBER]
Cosine = Annotated[float, Field(ge=-1, lt=1), NUMBER]
Anything = Annotated[Any, BeforeValidator(plain)]
# Types of paths that a job reads or writes. `check_paths` uses them to reject an output that would overwrite an input.
PathName = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
Source = Annotated[PathName, "read"]
DataSource = Annotated[PathName, "read", "rows"]
TaskName = Annotated[PathName, "read", "task"]
Suite = Annotated[str, "suite"]
File = Annotated[PathName, "written file"]
RecordFile = Annotated[PathName, "written file", "record"]  # a JSON result that also records its settings
Folder = Annotated[PathName, "written folder"]
UNRECORDED = "unrecorded"
Unrecorded = Annotated[T, UNRECORDED]  # a setting that does not affect results, such as the device

RECIPES = Path(__file__).with_name("recipes")
# {kind of a YAML value: (its form, its possible first characters)}; other words stay strings
OWN_RULES = {
    "int": (r"[-+]?(0|[1-9]\d*)$", "-+0123456789"),
    "float": (r"[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf)$|\.nan$", "-+.0123456789"),
    "bool": (r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
}  # fmt: skip
LOSSES = "raoe_train.losses"
OTHERS = "others"  # name of the field for keys that a section accepts in addition to its own fields
# words for the types and limits in a JSON schema
WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string",
         "null": "null"}  # fmt: skip
LIMITS = {"exclusiveMinimum": "above", "minimum": "of at least",
          "exclusiveMaximum": "below", "maximum": "of at most"}  # fmt: skip
shorten = reprlib.Repr()  # for messages: the repr of nested YAML aliases could be huge
shorten.maxstring = shorten.maxother = 200


@dataclasses.dataclass
class Choice:
    """A class chosen in the settings, such as a loss: its name in raoe_train.losses or its import path, and keyword
    arguments for its constructor. The key `loss` sets the class, and a key such as `loss.scale` sets the keyword
    `scale`. A recipe can also use the form loss: {class_path: CLASS, init_args: {KEYWORD: VALUE}}."""

    class_path: str
    init_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.class_path = self.class_path.removeprefix(f"{LOSSES}.")

    @property
    def chosen(self) -> Any:
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module or LOSSES), name)


class Key(NamedTuple):
    """The type, the help text and the default value of a setting or of a constructor keyword."""

    type: Any
    text: str  # help text
    default: Any


def nearest(word: str, candidates: Iterable[Any]) -> str:
    """Return " (did you mean WORD?)" with the most similar candidate, or "" if no candidate is similar."""
    section, dot, key = word.rpartition(".")
    names = {str(name).lower(): str(name) for name in candidates}
    if key in ("temperature", "tau") and f"{section}{dot}scale" in names:  # the same hint as in raoe_kernels
        return " (use scale, the inverse of a temperature)"
    inside = {low.rpartition(".")[2]: low for low, name in names.items() if dot and name.startswith(section + dot)}
    close = [low for each, low in inside.items() if key and key.rstrip("s") in each][:1]
    close = close or [inside[each] for each in difflib.get_close_matches(key.lower(), inside, n=1, cutoff=0.5)]
    if not inside:
        close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f" (did you mean {names[close[0]]}?)" if close else ""


def checked(config: T) -> T:
    """Return config.complete(), which also checks settings of other libraries, or `config` if it has no such method."""
    return config.complete() if hasattr(config, "complete") else config


def merge(config: type[T], layers: Iterable[Mapping[str, Any] | str | Path | None], prefix: str = "") -> T:
    """Create a configuration object from layers of settings. Later layers override earlier layers. The keywords of a
    Choice and the keys in `others` are checked later, by `checked`.

    Args:
        config: a dataclass; its fields are the keys, and fields that are dataclasses are sections (SECTION.KEY). If
            `config` is an instance, the layers override its values.
        layers: recipes (see read_recipe) and settings, nested (``{"model": {"name": "x"}}``) or dotted
            (``{"model.name": "x"}``). Strings are converted to the types of the fields, as on the command line.
        prefix: prefix of the keys in error messages.

    Raises:
        ValueError: an unknown key or recipe, or a value of the wrong type.
        FileNotFoundError: a recipe file does not exist.
    """
    result: Any = config() if isinstance(config, type) else copy.deepcopy(config)
    for layer in layers:
        if layer is not None:
            _apply(result, layer if isinstance(layer, Mapping) else read_recipe(layer), prefix)
    return _rebuild(result)


def _apply(section: Any, settings: Mapping[str, Any], prefix: str) -> None:
    """Set fields of a configuration object, and of the objects nested in it, from nested or dotted settings."""
    hints = hints_of(type(section))
    # set a class before its keywords, because a new class clears the keywords
    order = sorted(settings, key=lambda name: ("." in str(name), not str(name).endswith(".class_path")))
    for name in order:
        field, _, rest = str(name).partition(".")
        key, value = prefix + field, {rest: settings[name]} if rest else settings[name]
        hint = hints.get(field)
        inner = dataclass_in(hint)
        if OTHERS in hints and field not in hints:
            section.others[str(name)] = plain(value)
        elif hint is None or (rest and inner is None and "object" not in kinds_of(hint)):
            raise ValueError(f"unknown key {prefix}{name}{nearest(f'{prefix}{name}', keys_of(type(section), prefix))}")
        elif inner is Choice:
            setattr(section, field, _choose(key, getattr(section, field), value))
        elif inner is None:
            if rest:  # one entry of a mapping
                value = {**(getattr(section, field) or {}), **value}
            setattr(section, field, convert(key, value, hint))
        elif value is None:
            setattr(section, field, None if hint is not inner else getattr(section, field))
        elif isinstance(value, Mapping):
            setattr(section, field, getattr(section, field) or inner())
            _apply(getattr(section, field), value, f"{key}.")
        else:
            raise ValueError(f"{key} is a section, not a setting: set --{key}.KEY VALUE; got {shorten.repr(value)}")


def _choose(key: str, choice: Choice, value: Any) -> Choice:
    """Return a copy of `choice` with the class or the keywords in `value`. Setting a class clears earlier keywords."""
    if isinstance(value, str):
        return Choice(value)
    if not isinstance(value, Mapping) or not isinstance(value.get("init_args") or {}, Mapping):
        raise ValueError(f"{key} must be a class name or a mapping of its keyword arguments, got {shorten.repr(value)}")
    keywords = {str(name).removeprefix("init_args."): each for name, each in value.items()}
    path, nested = keywords.pop("class_path", None), keywords.pop("init_args", None) or {}
    choice = choice if path is None else Choice(convert(key, path, str))
    keywords = {name: plain(each) for name, each in {**nested, **keywords}.items()}
    return Choice(choice.class_path, choice.init_args | keywords)


def _rebuild(config: Any) -> Any:
    """Rebuild a configuration object, so that each __post_init__ checks the final values of all fields."""
    if not hasattr(config, "__dataclass_fields__"):
        return config
    return dataclasses.replace(config, **{name: _rebuild(getattr(config, name)) for name in hints_of(type(config))})


def keys_of(config: Any, prefix: str = "") -> dict[str, Key]:
    """Return {dotted key: Key} for every key and every section; a section comes before its keys."""
    keys, docs, defaults = dict[str, Key](), docs_of(config), config()
    for name, hint in hints_of(config).items():
        if name != OTHERS:
            keys[prefix + name] = Key(hint, docs.get(name, ""), getattr(defaults, name))
        section = dataclass_in(hint)
        if section not in (None, Choice):
            keys |= keys_of(section, f"{prefix}{name}.")
    return keys


def hints_of(config: Any) -> dict[str, Any]:
    """Return {field name: type} for all fields of a dataclass."""
    hints = typing.get_type_hints(config, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def dataclass_in(hint: Any) -> Any:
    """Return the dataclass in a type, such as X for X | None. Return None if the type contains no dataclass."""
    kinds = (kind for kind in (hint, *typing.get_args(hint)) if inspect.isclass(kind))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert the value of a key to the type `hint`. A string may contain YAML, and a single value may stand for a
    one-item list. If the conversion fails, raise a ValueError that names the key."""
    parsed = plain(value)
    candidates = (*([None] if parsed is None else []), value, parsed, [value])
    for candidate in () if isinstance(value, bytes) else candidates:  # pydantic reads bytes as text
        with contextlib.suppress(ValidationError):
            result = _adapter(hint).validate_python(candidate)
            return list(result) if isinstance(result, tuple) else result
    raise ValueError(f"{key} must be {describe(hint)}, got {shorten.repr(value)}")


def _schemas(hint: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of a type, one for each member of a union."""
    schema = _adapter(hint).json_schema()
    return schema.get("anyOf", [schema])


def kinds_of(hint: Any) -> set[str]:
    """Return the names of a type in JSON schemas, such as integer, array (a list) or object (a mapping)."""
    return {schema.get("type", "") for schema in _schemas(hint)}


def describe(hint: Any) -> str:
    """Describe a type in words."""
    if hint is Choice:
        return "the name of a class"
    return " or ".join(map(_describe, _schemas(hint)))


def _describe(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "")
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if kind == "object":
        nested = schema.get("additionalProperties") or {}
        is_nested = isinstance(nested, dict) and nested.get("type") == "object"
        return "a mapping, {NAME: {KEY: VALUE}}" if is_nested else "a mapping, NAME=VALUE ..."
    if kind == "array":
        return f"a list of values, each {_describe(schema['items'])}"
    limits = [f"{word} {schema[name]:.10g}" for name, word in LIMITS.items() if name in schema]
    return f"{WORDS.get(kind, 'any value')} {' and '.join(limits)}".strip()


def value_of(words: Sequence[str], hint: Any) -> Any:
    """Convert the words after an option on the command line to a value. If no words follow the option, the value is
    true. Words of the form NAME=VALUE become a mapping."""
    words = [str(Path(word).expanduser()) if word.startswith("~/") else word for word in words or ["true"]]
    if "object" in kinds_of(hint) and all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words)
    return words if len(words) > 1 else words[0]


def keywords_of(of: type) -> dict[str, Key]:
    """Return {keyword: Key} for each keyword argument of a class's constructor that has a default value. If the
    constructor takes ``**kwargs``, include the keywords of the base class."""
    keywords: dict[str, Key] = {}
    for base in of.__mro__:
        if "__init__" in vars(base):
            hints = typing.get_type_hints(vars(base)["__init__"], include_extras=True)
            parameters = inspect.signature(base).parameters.values()
            for each in parameters:
                if each.default is not each.empty and each.name not in keywords:
                    keywords[each.name] = Key(hints.get(each.name, Any), docs_of(of).get(each.name, ""), each.default)
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return keywords


def docs_of(config: type) -> dict[str, str]:
    """Return {field: description} from the "Args:" sections in the docstrings of a class and its base classes."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        args = (base.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
        entries = re.findall(r"^ {4,8}(\w+): (.*(?:\n {9,}.*)*)", args, re.MULTILINE)
        docs |= {name: " ".join(text.split()) for name, text in entries}
    return docs


def marked(config: Any, marker: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, path) for each path in a setting whose type is annotated with `marker`, such as "read"."""
    for name, hint in hints_of(type(config)).items():
        value, key = getattr(config, name), prefix + name
        if dataclasses.is_dataclass(value):
            yield from marked(value, marker, f"{key}.")
        elif value and marked_as(hint, marker):
            for text in [value] if isinstance(value, str) else value:
                yield key, text


def marked_as(hint: Any, marker: str) -> bool:
    """Return whether a type, or a type nested in it, is annotated with `marker`."""
    of = typing.get_args(hint)
    return marker in of or any(marked_as(each, marker) for each in of)


def to_dict(value: Any) -> Any:
    """Convert a configuration object or a section to plain values, as in a recipe."""
    if not dataclasses.is_dataclass(value):
        return value
    values = {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return values | values.pop(OTHERS, {})


def recipe_text(config: Any, without: Iterable[str] = ()) -> str:
    """Return the text of a YAML recipe with the settings of a configuration object, except the keys in `without`."""
    settings = {key: value for key, value in to_dict(config).items() if key not in without}
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def shipped() -> dict[str, Path]:
    """Return {name: file} for the recipes that are shipped with the package."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def read_recipe(recipe: str | Path) -> Mapping[str, Any]:
    """Read the settings of a recipe: a YAML file, or the name of a shipped recipe. Raise ValueError if the name is
    unknown or the file is not a YAML mapping."""
    name, recipes = str(recipe), shipped()
    path = recipes.get(name, Path(name).expanduser())
    if name not in recipes and not (path.suffix in (".yaml", ".yml") or "/" in name or "\\" in name):
        raise ValueError(f"unknown recipe {name!r}{nearest(name, recipes)}; shipped recipes: {', '.join(recipes)}")
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {name}")
    try:
        values = read_yaml(path.read_text(encoding="utf-8-sig")) or {}
    except ValueError as error:
        raise ValueError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {path} must be a mapping of settings, got {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-8 as a number, as YAML 1.2 does. The loader keeps words such as 007, 1_000, 1:30,
    2026-11-26, yes and off as strings, although YAML 1.1 reads them as numbers, dates or booleans."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        first: [(tag, form) for tag, form in rules if tag.rpartition(":")[2] not in (*OWN_RULES, "timestamp")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag, (_form, _starts) in OWN_RULES.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_form), [*_starts])


def read_yaml(text: str) -> Any:
    """Parse a YAML text. Raise ValueError if the text is invalid."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(error) from None
