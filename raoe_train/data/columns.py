"""Which column holds what, and what a text, a score and an NLI label may look like."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raoe_train.config import nearest

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
    # of triplets, with SimCSE's sent0, sent1 and hard_neg; queries have positive and negative, too (MTEB)
    "anchor": ("anchor", "sentence0", "sent0"),
    "positive": ("positive", "positives", "pos", "sentence1", "sent1"),
    "negative": ("negative", "negatives", "neg", "sentence2", "hard_neg"),
    "neutral": ("neutral",),
}
"""{our column: its names in files}. A row may have one of them only."""

FIRST = ("sentence", "image", "caption")  # but of these several, and the first is used
NLI_LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}  # larger = less similar, which RAOE's gate compares
LabelMap = Mapping[str, int | None] | Mapping[int, int | None]  # {word or int: class}, None leaves rows out
NO_GOLD_LABEL = ("-", "-1", "")
LONGEST = 500  # characters of a message


class RowProblem(Exception):
    """A row that cannot be used. Such rows are counted by `reason`; on_error applies to `malformed` ones only."""

    def __init__(self, message: str, *, reason: str = "malformed row") -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]} … ({len(message)} characters)")
        self.reason = reason
        self.malformed = reason not in ("no gold label", "blank line", "label left out")


class Columns:
    """Finds our columns in rows by their names, or as `mapping` says (`columns` of read_pairs)."""

    def __init__(self, mapping: Mapping[str, str | None] | None = None) -> None:
        for name in mapping or {}:
            if name not in NAMES:
                near = nearest(repr(name), map(repr, NAMES))
                raise ValueError(f"columns maps our names ({', '.join(NAMES)}) to the source's; got {name!r}{near}")
        unread = ("", "none", "null")  # recipes and command lines write None as text
        self.mapping = {
            name: None if column is None or str(column).lower() in unread else str(column)
            for name, column in (mapping or {}).items()
        }
        self._found: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, str]]] = {}  # by required columns, by fields

    def find(
        self, fields: Mapping[str, Any], require: Sequence[str], optional: Iterable[str] = (), one_of: tuple = ()
    ) -> dict[str, str]:
        """{our name: its column}; RowProblem for one that is missing (or all of one_of), ambiguous or unlike before."""
        key, others = tuple(fields), self._found.setdefault(tuple(require), {})
        if key not in others:
            columns = {name: self._column(fields, name, name in require) for name in (*require, *optional)}
            found = {name: column for name, column in columns.items() if column is not None}
            if one_of and not set(one_of) & set(found):
                self._column(fields, one_of[0], True)
            first = next(iter(others.values()), found)
            if set(found) != set(first):
                raise RowProblem(f"it has {', '.join(found)} where earlier rows have {', '.join(first)}")
            others[key] = found
        return others[key]

    def _column(self, fields: Mapping[str, Any], name: str, required: bool) -> str | None:
        mapped, known = self.mapping.get(name), NAMES[name]
        if name in self.mapping:
            there = [mapped] if mapped in fields else []
        else:
            there = [column for column in known if column in fields and column not in self.mapping.values()]
        if len(there) > 1 and name not in FIRST:
            both = " and ".join(map(str, there))
            raise RowProblem(f"columns {both} could both be {name}; say which: columns {name}=...")
        if there or (mapped is None and not required):
            return there[0] if there else None
        looked, listed = mapped or ", ".join(known), ", ".join(map(repr, fields))
        advice = f"there are: {listed}; say which: columns {name}=..."
        raise RowProblem(f"no column for {name} (looked for {looked}); {advice}")


def parse_sentence(column: str, value: Any) -> str:
    """A text that is not empty."""
    try:
        value.encode()  # fails for a lone surrogate, which JSON can hold and tokenizers and tables cannot
    except (AttributeError, UnicodeEncodeError):
        raise RowProblem(f"{column} is {value!r}, not a text") from None
    if not value.strip():
        raise RowProblem(f"{column} is empty", reason="empty sentence")
    return value


def as_word(value: Any) -> str:
    """A class or another name as a text, "" where there is none."""
    if isinstance(value, float):  # a table with holes has 1.0 in place of 1, and NaN in place of nothing
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None or isinstance(value, (list, dict, bytes)) else str(value).strip()


def parse_word(column: str, value: Any) -> str:
    """A class or another name, which must be there."""
    if not (word := as_word(value)):
        raise RowProblem(f"{column} is {value!r}, which names nothing")
    return word


def parse_score(column: str, value: Any, scale: Sequence[float] | None = None) -> float:
    """A finite number, inside `scale` where one is declared."""
    try:
        if isinstance(value, (bool, bytes)) or (isinstance(value, str) and "_" in value):  # 1_0 is 10 to Python
            raise TypeError
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RowProblem(f"{column} is {value!r}, not a number", reason="bad score") from None
    if not math.isfinite(score):
        raise RowProblem(f"{column} is {value!r}, not a finite number", reason="bad score")
    if scale and not scale[0] <= score <= scale[1]:
        declared = f"the declared score_scale {scale[0]:g} to {scale[1]:g}"
        raise RowProblem(f"{column} {score:g} is outside {declared}", reason="bad score")
    return score


def resolve_label_map(labels: LabelMap | None) -> dict[str, int | None]:
    """{lower-case word: class}; ValueError for a class that is not None and no int of at least 0."""
    if labels is None:
        return {**NLI_LABELS, **{str(label): label for label in NLI_LABELS.values()}}
    for word, label in labels.items():
        if label is not None and (isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < 2**63):
            classes = "classes 0, 1, ..., or to null, which leaves such rows out"
            raise ValueError(f"labels must map to {classes}; got {word!r}: {label!r}")
    if all(label is None for label in labels.values()):
        raise ValueError(f"labels leaves every row out: give a class to one of {', '.join(map(str, labels))}")
    found = {str(word).lower(): label for word, label in labels.items()}
    if twice := [word for word, label in labels.items() if found[str(word).lower()] != label]:
        raise ValueError(f"labels gives {twice[0]!r} two classes: upper and lower case are one word")
    return found


def parse_label(column: str, value: Any, label_map: Mapping[str, int | None]) -> int:
    """The class of a label; RowProblem for a label that the map leaves out or does not have."""
    word = as_word(value)
    if (number := word.removesuffix(".0")).removeprefix("-").isdigit():  # 1.0: a table's way to say 1 beside holes
        word = number
    if not isinstance(value, bool) and word.lower() in label_map:
        label = label_map[word.lower()]
        if label is None:
            raise RowProblem(f"{column} is {value!r}, which labels leaves out", reason="label left out")
        return label
    if word in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}, no gold label", reason="no gold label")
    raise RowProblem(
        f"{column} is {value!r}; known are {', '.join(label_map)}. "
        f'Say what it means with labels {{"{word.lower()}": 0, ...}}, or leave it unread with columns label=none '
        f"(if it is a score: columns score={column})",
        reason="unknown label",
    )
