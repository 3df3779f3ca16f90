"""Which column holds what, and what a text, a score and an NLI label may look like."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raoe_train.config import nearest

ROLES: dict[str, tuple[str, ...]] = {
    "anchor": ("anchor", "sentence0", "sent0"),
    "positive": ("positive", "positives", "pos", "sentence1", "sent1"),
    "negative": ("negative", "negatives", "neg", "sentence2", "hard_neg"),
    "neutral": ("neutral",),
}
"""Of triplets; sent0, sent1, hard_neg are SimCSE's. Positive and negative are also of queries, as MTEB calls them."""

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
    **ROLES,
}
"""Our column names and the names they are found by in a file. At most one of a row may be there."""

FIRST = ("sentence", "image", "caption")
"""Of these several may be there, and the first is taken."""

NLI_LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}
"""The default classes: larger is less similar, the order that RAOE's gate compares."""

LabelMap = Mapping[str, int | None] | Mapping[int, int | None]
"""{word or int: class}; None in place of a class leaves rows with such a label out."""

NO_GOLD_LABEL = ("-", "-1", "")


LONGEST = 500  # characters of a message


class RowProblem(Exception):
    """A row that cannot be used. `reason` is a key to count by; not `malformed` where formats leave such rows out."""

    def __init__(self, message: str, *, reason: str = "malformed row") -> None:
        # a list of a million scores is no message
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]} … ({len(message)} characters)")
        self.reason = reason
        self.malformed = reason not in ("no gold label", "blank line", "label left out")


class Columns:
    """Finds our columns among the columns of rows, by name or as mapped, see `columns` of read_pairs."""

    def __init__(self, mapping: Mapping[str, str | None] | None = None) -> None:
        for name in mapping or {}:
            if name not in NAMES:
                near = nearest(repr(name), map(repr, NAMES))
                raise ValueError(f"columns maps our names ({', '.join(NAMES)}) to the source's; got {name!r}{near}")
        self.mapping = {name: _column(column) for name, column in (mapping or {}).items()}
        self._taken = set(self.mapping.values())
        self._found: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, str]]] = {}  # by what is required, by fields

    def find(self, fields: Mapping[str, Any], require: Sequence[str], optional: Iterable[str] = ()) -> dict[str, str]:
        """{our name: this row's column}; RowProblem if a required one is missing, or one is there twice, or not as in
        earlier rows."""
        key, others = tuple(fields), self._found.setdefault(tuple(require), {})
        if key not in others:
            columns = {name: self._column(fields, name, name in require) for name in (*require, *optional)}
            found = {name: column for name, column in columns.items() if column is not None}
            first = next(iter(others.values()), found)
            if set(found) != set(first):
                raise RowProblem(f"it has {', '.join(found)} where earlier rows have {', '.join(first)}")
            others[key] = found
        return others[key]

    def _column(self, fields: Mapping[str, Any], name: str, required: bool) -> str | None:
        mapped = self.mapping.get(name)
        if mapped is not None:
            there = [mapped] if mapped in fields else []
        elif name in self.mapping:
            there = []
        else:
            there = [column for column in NAMES[name] if column in fields and column not in self._taken]
        if len(there) > 1 and name not in FIRST:
            raise RowProblem(f"columns {' and '.join(there)} could both be {name}; say which: columns {name}=...")
        if there or (mapped is None and not required):
            return there[0] if there else None
        looked = mapped or ", ".join(NAMES[name])
        listed = ", ".join(map(repr, fields))
        raise RowProblem(
            f"no column for {name} (looked for {looked}); there are: {listed}; say which: columns {name}=..."
        )


def _column(column: str | None) -> str | None:
    # recipes and command lines carry text
    return None if column is None or str(column).lower() in ("", "none", "null") else str(column)


def parse_sentence(column: str, value: Any) -> str:
    """A text with something in it."""
    try:
        value.encode()  # half of a surrogate pair, which JSON can say, no tokenizer and no table takes
    except (AttributeError, UnicodeEncodeError):
        raise RowProblem(f"{column} is {value!r}, not a text") from None
    if not value.strip():
        raise RowProblem(f"{column} is empty", reason="empty sentence")
    return value


def parse_word(column: str, value: Any) -> str:
    """A class, or another name; 1.0 and NaN are what a table with holes makes of 1 and of nothing."""
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    word = optional_word(value).strip()
    if not word or isinstance(value, (list, dict, bytes)):
        raise RowProblem(f"{column} is {value!r}, which names nothing")
    return word


def optional_word(value: Any) -> str:
    """A name as a text, "" where there is none."""
    return "" if value is None else str(value)


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
        outside = f"{column} {score:g} is outside the declared score_scale {scale[0]:g} to {scale[1]:g}"
        raise RowProblem(outside, reason="bad score")
    return score


def resolve_label_map(labels: LabelMap | None) -> dict[str, int | None]:
    """The label map by lower-case word; ValueError if a class is no int of at least 0 and not None."""
    if labels is None:
        return {**NLI_LABELS, **{str(label): label for label in NLI_LABELS.values()}}
    for word, label in labels.items():
        if label is not None and (isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < 2**63):
            raise ValueError(
                f"labels must map to classes 0, 1, ..., or to null, which leaves such rows out; got {word!r}: {label!r}"
            )
    if all(label is None for label in labels.values()):
        raise ValueError(f"labels leaves every row out: give a class to one of {', '.join(map(str, labels))}")
    return {str(word).lower(): label for word, label in labels.items()}


def parse_label(column: str, value: Any, label_map: Mapping[str, int | None]) -> int:
    """The class of a label given as a word or an int; RowProblem for one that the map does not know, or leaves out."""
    try:
        word = parse_word(column, value)
    except RowProblem:
        word = ""
    if not isinstance(value, bool) and word.lower() in label_map:
        found = label_map[word.lower()]
        if found is None:
            raise RowProblem(f"{column} is {value!r}, which labels leaves out", reason="label left out")
        return found
    if word in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}, no gold label", reason="no gold label")
    raise RowProblem(
        f"{column} is {value!r}; known are {', '.join(label_map)}. "
        f'Say what it means with labels {{"{word.lower()}": 0, ...}}, or leave it unread with columns label=none '
        f"(if it is a score: columns score={column})",
        reason="unknown label",
    )
