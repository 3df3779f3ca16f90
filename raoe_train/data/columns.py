"""Find raoe's columns in a source, and parse texts, scores and NLI labels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raoe_train.config import nearest

LISTS = ("positives", "pos", "positive_passages", "negatives", "neg", "negative_passages")  # columns of lists of texts
NAMES: dict[str, tuple[str, ...]] = {
    "sentence1": ("sentence1", "premise", "text1", "sentence_A"),
    "sentence2": ("sentence2", "hypothesis", "text2", "sentence_B"),
    "score": ("score", "similarity", "relatedness_score"),
    "label": ("label", "gold_label", "entailment_label", "entailment_judgment"),
    "subset": ("subset",),
    "split": ("split",),
    "condition": ("condition",),
    "sentence": ("sentence", "text"),
    "query": ("query",),
    "image": ("image", "image_id", "image_name", "filename"),
    "caption": ("caption", "comment", "sentence", "text"),
    # for rows, with SimCSE's sent0, sent1 and hard_neg; MTEB's queries also have positive and negative
    "anchor": ("anchor", "query", "question", "sentence0", "sent0"),
    "positive": ("positive", "answer", "passage", "document", "sentence1", "sent1", *LISTS[:3]),
    "negative": ("negative", "sentence2", "hard_neg", *LISTS[3:]),
    "neutral": ("neutral",),
}
"""{raoe's column: its names in files}. A row must not have more than one of these names."""
FIRST = ("sentence", "image", "caption")  # rows may have several names of these columns; the first is used
NLI_LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}  # larger = less related, which RAOE's gate compares
LabelMap = Mapping[str, int | None] | Mapping[int, int | None]  # {word or int: class; None drops rows}
NO_GOLD_LABEL = ("-", "-1", "")
LONGEST = 500  # maximum length of a message in characters


class RowProblem(Exception):
    """A row that cannot be used. Such rows are counted by `reason`. on_error applies only to `malformed` rows."""

    def __init__(self, message: str, *, reason: str = "malformed row") -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]} … ({len(message)} characters)")
        self.reason = reason
        self.malformed = reason not in ("no gold label", "blank line", "label left out", "unknown id")


class Columns:
    """Finds raoe's columns in rows by NAMES, or by `mapping` (the argument `columns` of read_pairs)."""

    def __init__(self, mapping: Mapping[str, str | None] | None = None) -> None:
        for name in mapping or {}:
            if name not in NAMES:
                hint = nearest(repr(name), map(repr, NAMES))
                raise ValueError(f"unknown name {name!r} in columns{hint}; known names: {', '.join(NAMES)}")
        nulls = ("", "none", "null")  # recipes and command lines write None as text
        self.mapping = {
            name: None if column is None or str(column).lower() in nulls else str(column)
            for name, column in (mapping or {}).items()
        }
        self._cache: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, str]]] = {}  # keys: required columns, fields

    def find(
        self, fields: Mapping[str, Any], require: Sequence[str], optional: Iterable[str] = (), one_of: tuple = ()
    ) -> dict[str, str]:
        """Return {raoe's name: column}. RowProblem if a column is missing, ambiguous or not as in earlier rows."""
        key, cache = tuple(fields), self._cache.setdefault(tuple(require), {})
        if key not in cache:
            columns = {name: self.column(fields, name, name in require) for name in (*require, *optional)}
            names = {name: column for name, column in columns.items() if column is not None}
            if one_of and not set(one_of) & set(names):
                self.column(fields, one_of[0], True)
            earlier = next(iter(cache.values()), names)
            if set(names) != set(earlier):
                raise RowProblem(f"the row has {', '.join(names)}, but earlier rows have {', '.join(earlier)}")
            cache[key] = names
        return cache[key]

    def column(self, fields: Mapping[str, Any], name: str, required: bool) -> str | None:
        """Return the column for a name of raoe, or None. RowProblem if it is ambiguous, or missing and required."""
        mapped, aliases = self.mapping.get(name), NAMES[name]
        if name in self.mapping:
            present = [mapped] if mapped in fields else []
        else:
            present = [column for column in aliases if column in fields and column not in self.mapping.values()]
        if len(present) > 1 and name not in FIRST:
            choices = " and ".join(map(str, present))
            raise RowProblem(f"columns {choices} could both be {name}: choose one, --data.columns {name}=COLUMN")
        if present or (mapped is None and not required):
            return present[0] if present else None
        expected, headers = mapped or ", ".join(aliases), ", ".join(map(repr, fields))
        advice = f"map one of these columns with --data.columns {name}=COLUMN: {headers}"
        if name == "sentence1" and all({*NAMES[each]} & {*fields} for each in ("anchor", "positive")):
            advice = f"raoe_train.data.rows.row_table reads rows of queries and passages; for pairs, {advice}"
        raise RowProblem(f"no column for {name} (looked for {expected}); {advice}")


def parse_sentence(column: str, value: Any) -> str:
    """Check that a value is a text and not empty."""
    try:
        value.encode()  # fails for a lone surrogate, which is possible in JSON, but not in tokenizers and tables
    except (AttributeError, UnicodeEncodeError):
        raise RowProblem(f"{column} is {value!r}, not a text") from None
    if not value.strip():
        raise RowProblem(f"{column} is empty", reason="empty sentence")
    return value


def as_word(value: Any) -> str:
    """Convert a label or a name to a text; "" for a missing value, or one that cannot be a name (list, dict, bytes)."""
    if isinstance(value, float):  # a table with missing values has 1.0 for 1, and NaN
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None or isinstance(value, (list, dict, bytes)) else str(value).strip()


def parse_word(column: str, value: Any) -> str:
    """Convert a label or a name to a text; RowProblem if the value is missing or cannot be a name."""
    if not (word := as_word(value)):
        raise RowProblem(f"{column} is {value!r}, not a name")
    return word


def parse_score(column: str, value: Any, scale: Sequence[float] | None = None) -> float:
    """Convert a score to a number; RowProblem if it is not a finite number, or is outside `scale`."""
    try:
        if isinstance(value, (bool, bytes)) or (isinstance(value, str) and "_" in value):  # Python reads 1_0 as 10
            raise TypeError
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RowProblem(f"{column} is {value!r}, not a number", reason="bad score") from None
    if not math.isfinite(score):
        raise RowProblem(f"{column} is {value!r}, not a finite number", reason="bad score")
    if scale and not scale[0] <= score <= scale[1]:
        bounds = f"the declared score_scale {scale[0]:g} to {scale[1]:g}"
        raise RowProblem(f"{column} {score:g} is outside {bounds}", reason="bad score")
    return score


def resolve_labels(labels: LabelMap | None) -> dict[str, int | None]:
    """Return {lower-case word: class}. ValueError for a class that is neither None nor an integer of at least 0."""
    if labels is None:
        return {**NLI_LABELS, **{str(label): label for label in NLI_LABELS.values()}}
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels must be a mapping of words or numbers to classes, got {labels!r}")
    for word, label in labels.items():
        if label is not None and (isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < 2**63):
            classes = "classes 0, 1, ..., or to null to skip rows with the label"
            raise ValueError(f"labels must map to {classes}; got {word!r}: {label!r}")
    if all(label is None for label in labels.values()):
        raise ValueError(f"labels maps every label to null: map one of {', '.join(map(str, labels))} to a class")
    return {str(word).lower(): label for word, label in labels.items()}


def parse_label(column: str, value: Any, label_map: Mapping[str, int | None]) -> int:
    """Return the class of a label. RowProblem for a label that label_map maps to None or does not contain."""
    word = as_word(value)
    if (number := word.removesuffix(".0")).removeprefix("-").isdigit():  # in a table with missing values, 1 is 1.0
        word = number
    if not isinstance(value, bool) and word.lower() in label_map:
        label = label_map[word.lower()]
        if label is None:
            raise RowProblem(f"{column} is {value!r}, which `labels` maps to null", reason="label left out")
        return label
    if word in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}, not a gold label", reason="no gold label")
    raise RowProblem(
        f"{column} is {value!r}, which is not a known label ({', '.join(label_map)}). "
        f'Map it to a class with labels {{"{word.lower()}": 0, ...}}, or ignore the column with columns label=none '
        f"(if it holds scores: columns score={column})",
        reason="unknown label",
    )
