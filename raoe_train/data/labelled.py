"""Texts with a class each, as classification data are: what mining and polarity scores read."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raoe_train.data.fields import NO_GOLD_LABEL, RowProblem, parse_sentence
from raoe_train.data.sources import open_source

logger = logging.getLogger(__name__)

COLUMNS: dict[str, tuple[str, ...]] = {"text": ("text", "sentence"), "label": ("label",)}
"""Our column names and the names they are found by."""


@dataclass(frozen=True)
class LabelledData:
    """Texts and their classes, no text twice.

    Attributes:
        text: the texts, in file order.
        label: the class of each, as the file calls it.
        counts: {"read": rows read, "kept": texts, "other_split": rows of splits not asked for, "dropped": {reason:
            rows}}; read = kept + other_split + all dropped.
    """

    text: list[str]
    label: list[str]
    counts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.text) != len(self.label):
            raise ValueError(f"there are {len(self.label)} labels for {len(self.text)} texts")

    def __len__(self) -> int:
        return len(self.text)

    def classes(self) -> dict[str, int]:
        """{class: how many texts}, in the order of the names."""
        return dict(sorted(Counter(self.label).items()))


def read_labelled(
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | int | None] | None = None,
    on_error: str = "raise",
    repeats: bool = False,
) -> LabelledData:
    """Read texts with a class each, any number of classes, named by words or numbers.

    Args:
        source: FILE or FILE#split (TSV, CSV, JSONL or parquet, also .gz), or a dataset on a hub, as for `read_pairs`.
        columns: {"text", "label" or "split": the source's column} where it is not found by its name (text or sentence,
            label, split).
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.
        repeats: keep rows whose text was there before.

    Left out and counted, always: "blank line"; "no label" (empty, "-" or -1, as GLUE hides those of its test sets);
    without `repeats` "duplicate" (a text that was there with the same label) and "two labels" (all rows of a text that
    stands there with different ones: it says nothing of either).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), a column that is missing, or no text left.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    mapping = dict(columns or {})
    if unknown := sorted(set(mapping) - {*COLUMNS, "split"}):
        raise ValueError(f"columns maps {', '.join(COLUMNS)} and split of labelled texts; got {', '.join(unknown)}")
    opened = open_source(source, {name: column for name, column in mapping.items() if name == "split"})
    texts: list[str] = []
    labels: list[str] = []
    dropped: Counter[str] = Counter()
    read = 0
    for line, fields in opened.rows:
        read += 1
        try:
            text, label = _parse(fields, mapping)
        except RowProblem as problem:
            if problem.reason not in ("blank line", "no label") and on_error == "raise":
                raise ValueError(f"{opened.name}, {opened.unit} {line}: {problem}") from None
            dropped[problem.reason] += 1
            continue
        texts.append(text)
        labels.append(label)
    if not repeats:
        texts, labels = _distinct(texts, labels, dropped)
    if not texts:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.items()) or "there are no rows"
        raise ValueError(f"{opened.name}: no labelled text left of {read} rows: {reasons}")
    if dropped:
        logger.warning("%s: %d of %d rows left out: %s", opened.name, dropped.total(), read, dict(dropped))
    counts = {
        "read": read + opened.other_split[0],
        "kept": len(texts),
        "other_split": opened.other_split[0],
        "dropped": dict(dropped),
    }
    return LabelledData(texts, labels, counts)


def _parse(fields: dict[str, Any] | str, mapping: Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(fields, str):
        raise RowProblem(fields, reason="blank line" if fields == "blank line" else "malformed row")
    found = {}
    for name, candidates in COLUMNS.items():
        wanted = [str(mapping[name])] if name in mapping else list(candidates)
        there = [column for column in wanted if column in fields]
        if len(there) != 1:
            listed = ", ".join(map(repr, fields))
            problem = f"{' and '.join(there)} could both be" if there else f"no column {' or '.join(wanted)!r} for"
            raise RowProblem(f"{problem} {name}; there are: {listed}; say which: columns {name}=...")
        found[name] = fields[there[0]]
    return parse_sentence("text", found["text"]), _label(found["label"])


def _label(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)  # what a table with holes makes of ints
    word = "" if value is None or value != value else str(value).strip()
    if word in NO_GOLD_LABEL:
        raise RowProblem(f"label is {value!r}", reason="no label")
    if isinstance(value, (list, dict)):
        raise RowProblem(f"label is {value!r}, not a word or a number", reason="bad label")
    return word


def _distinct(texts: list[str], labels: list[str], dropped: Counter[str]) -> tuple[list[str], list[str]]:
    first: dict[str, str] = {}
    torn: set[str] = set()
    for text, label in zip(texts, labels, strict=True):
        if first.setdefault(text, label) != label:
            torn.add(text)
    kept = {text: label for text, label in first.items() if text not in torn}
    if two := sum(text in torn for text in texts):
        dropped["two labels"] = two
    if repeated := len(texts) - two - len(kept):
        dropped["duplicate"] = repeated
    return list(kept), list(kept.values())
