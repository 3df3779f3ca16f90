"""Which column holds what, and what a score and an NLI label may look like."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAMES: dict[str, tuple[str, ...]] = {
    "sentence1": ("sentence1", "premise", "text1", "sentence_A"),
    "sentence2": ("sentence2", "hypothesis", "text2", "sentence_B"),
    "score": ("score", "similarity", "relatedness_score"),
    "label": ("label", "gold_label", "entailment_label", "entailment_judgment"),
    "subset": ("subset",),
    "split": ("split",),
}
"""Our column names and the names they are found by in a file. At most one of a row may be there."""

TEXT_COLUMNS = ("sentence", "text")
"""Names of the column of a file whose rows are single sentences."""

NLI_LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2, "0": 0, "1": 1, "2": 2}
"""The default label map: larger is less similar, the order that RAOE's gate compares."""

LabelMap = Mapping[str, int | None] | Mapping[int, int | None]
"""{word or int: class}; None in place of a class leaves rows with such a label out."""

NO_GOLD_LABEL = ("-", "-1", "")
LEFT_OUT = "label left out"  # the reason of rows whose label the map gives no class


class RowProblem(Exception):
    """A row that cannot be used. `reason` is a short key to count by; `malformed` is False where leaving the
    row out is what the format asks for."""

    def __init__(self, message: str, *, reason: str = "malformed row") -> None:
        super().__init__(message)
        self.reason = reason
        self.malformed = reason not in ("no gold label", "blank line", LEFT_OUT)


class Columns:
    """Finds our columns among the columns of rows, by name or as mapped.

    Args:
        mapping: {our name: the source's column, or None or "none" to leave it unread}. All columns ints, or
            digits: positions from 0, and the file has no header line.
    """

    def __init__(self, mapping: Mapping[str, str | int | None] | None = None) -> None:
        self.mapping = {name: _column(column) for name, column in (mapping or {}).items()}
        for name in self.mapping:
            if name not in NAMES:
                near = difflib.get_close_matches(name, NAMES, 1)
                raise ValueError(
                    f"columns maps our names ({', '.join(NAMES)}) to the source's; got {name!r}"
                    + (f", did you mean {near[0]!r}?" if near else "")
                )
        named = [column for column in self.mapping.values() if column is not None]
        self.positions = bool(named) and all(isinstance(column, int) for column in named)
        if not self.positions and any(isinstance(column, int) for column in named):
            raise ValueError(f"columns must be all names or all positions (ints), got {self.mapping}")
        self._found: dict[tuple[str, ...], dict[str, str]] = {}

    def find(self, fields: Mapping[str, Any], require: Iterable[str] = (), *, pair: bool = True) -> dict[str, str]:
        """{our name: this row's column} for every column that is there; RowProblem if one is missing or there
        twice. Without `pair`, rows need not be pairs of sentences."""
        key = tuple(fields)
        if key not in self._found:
            found = self._search(fields, (*(("sentence1", "sentence2") if pair else ()), *require))
            first = next(iter(self._found.values()), found)
            if set(found) != set(first):
                raise RowProblem(f"it has {', '.join(found)} where earlier rows have {', '.join(first)}")
            self._found[key] = found
        return self._found[key]

    def _search(self, fields: Mapping[str, Any], require: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        taken = {str(column) for column in self.mapping.values() if column is not None}
        for name, candidates in NAMES.items():
            if name in self.mapping:
                column = self.mapping[name]
                if column is None:
                    continue
                if str(column) not in fields:
                    raise RowProblem(f"no column {column!r} (columns maps {name} to it); there are: {_listed(fields)}")
                found[name] = str(column)
                continue
            there = [column for column in candidates if column in fields and column not in taken]
            if len(there) > 1:
                raise RowProblem(f"columns {' and '.join(there)} could both be {name}; say which: columns {name}=...")
            if there and not self.positions:
                found[name] = there[0]
        for name in require:
            if name not in found:
                raise RowProblem(
                    f"no column for {name} (looked for {', '.join(NAMES[name])}); "
                    f"there are: {_listed(fields)}; say which: columns {name}=..."
                )
        return found


def named_column(fields: Mapping[str, Any], name: str, candidates: Sequence[str], mapped: Any = None) -> str:
    """The column of a row that is `name`: the one mapped to it, or the first candidate; RowProblem without one."""
    wanted = candidates if mapped is None else (str(mapped),)
    for column in wanted:
        if column in fields:
            return column
    raise RowProblem(
        f"no column for {name} (looked for {', '.join(wanted)}); "
        f"there are: {_listed(fields)}; say which: columns {name}=..."
    )


def _column(column: str | int | None) -> str | int | None:
    # recipes and command lines carry text
    if isinstance(column, str):
        return None if column.lower() in ("", "none", "null") else int(column) if column.isdecimal() else column
    return column


def _listed(fields: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in fields)


def parse_sentence(name: str, value: Any) -> str:
    """A text with something in it."""
    try:
        value.encode()  # half of a surrogate pair, which JSON can say, no tokenizer and no table can hold
    except (AttributeError, UnicodeEncodeError):
        raise RowProblem(f"{name} is {value!r}, not a text") from None
    if not value.strip():
        raise RowProblem(f"{name} is empty", reason="empty sentence")
    return value


def parse_score(value: Any, scale: Sequence[float] | None, column: str = "score") -> float:
    """A finite number, inside `scale` where one is declared."""
    try:
        if isinstance(value, bool):
            raise TypeError
        score = float(value)
    except (TypeError, ValueError):
        raise RowProblem(f"{column} is {value!r}, not a number", reason="bad score") from None
    if not math.isfinite(score):
        raise RowProblem(f"{column} is {value!r}, not a finite number", reason="bad score")
    if scale is not None and not scale[0] <= score <= scale[1]:
        raise RowProblem(
            f"{column} {score:g} is outside the declared score_scale {scale[0]:g} to {scale[1]:g}",
            reason="bad score",
        )
    return score


def resolve_label_map(labels: LabelMap | None) -> dict[str, int | None]:
    """The label map by lower-case word; ValueError if a class is no int of at least 0 and not None."""
    if labels is None:
        return dict(NLI_LABELS)
    if not labels:
        raise ValueError("labels is an empty map; leave it out for the NLI labels")
    for word, label in labels.items():
        if label is not None and (isinstance(label, bool) or not isinstance(label, int) or label < 0):
            raise ValueError(
                f"labels must map to classes 0, 1, ..., or to null, which leaves such rows out; got {word!r}: {label!r}"
            )
    if all(label is None for label in labels.values()):
        raise ValueError(f"labels leaves every row out: give a class to one of {', '.join(map(str, labels))}")
    return {str(word).lower(): label for word, label in labels.items()}


def parse_label(value: Any, label_map: Mapping[str, int | None], column: str = "label") -> int:
    """The class of a label given as a word or an int; RowProblem for one that the map does not know, or leaves out."""
    if isinstance(value, float) and math.isnan(value):
        value = None
    elif isinstance(value, float) and value.is_integer():
        value = int(value)  # what a table with holes makes of ints
    word = "" if value is None else str(value).strip().lower()
    if not isinstance(value, bool) and word in label_map:
        found = label_map[word]
        if found is None:
            raise RowProblem(f"{column} is {value!r}, which labels leaves out", reason=LEFT_OUT)
        return found
    if word in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}, no gold label", reason="no gold label")
    raise RowProblem(
        f"{column} is {value!r}; known are {', '.join(label_map)}. "
        f'Say what it means with labels {{"{word}": 0, ...}}, or leave it unread with columns label=none '
        f"(if it is a score: columns score={column})",
        reason="unknown label",
    )
