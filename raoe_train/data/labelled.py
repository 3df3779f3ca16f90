"""Sentences, or pairs of them, with a class each: the files of transfer tasks, of mining and of polarity scores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raoe_train.data.columns import NAMES, TEXT_COLUMNS, RowProblem, named_column, parse_sentence
from raoe_train.data.rows import kept_rows
from raoe_train.data.sources import Source, open_source


@dataclass(frozen=True)
class LabelledData:
    """Column by column, one entry an example, in file order.

    Attributes:
        text: the sentence, or the first of a pair.
        second: the second sentences, or None where examples are single sentences.
        label: each example's class, as the file writes it.
        split: the part of the set that each example is in; "" everywhere where a file has no such column.
        counts: see kept_rows, summed over the sources.
    """

    text: list[str]
    second: list[str] | None
    label: list[str]
    split: list[str]
    counts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.text)

    def classes(self) -> dict[str, int]:
        """{class: how many examples}, in the order of the names."""
        return dict(sorted(Counter(self.label).items()))

    def at(self, places: Iterable[int]) -> LabelledData:
        """The examples at these places; counts stay those of the file."""
        places = list(places)
        columns = ([column[place] for place in places] for column in (self.text, self.label, self.split))
        text, label, split = columns
        second = None if self.second is None else [self.second[place] for place in places]
        return LabelledData(text, second, label, split, self.counts)

    def distinct(self) -> LabelledData:
        """Each text once, and none that stands there with two classes, as it says nothing of either. What is left out
        is counted, as "duplicate" and "two labels"."""
        first: dict[str, int] = {}
        torn: set[str] = set()
        for place, text in enumerate(self.text):
            if self.label[first.setdefault(text, place)] != self.label[place]:
                torn.add(text)
        kept = [place for text, place in first.items() if text not in torn]
        two = sum(text in torn for text in self.text)
        left_out = {"two labels": two, "duplicate": len(self) - two - len(kept)}
        dropped = self.counts.get("dropped", {}) | {reason: rows for reason, rows in left_out.items() if rows}
        found = self.at(kept)
        return replace(found, counts={**self.counts, "kept": len(kept), "dropped": dropped})


def read_labelled(
    source: str | os.PathLike[str] | Sequence[Source],
    *,
    columns: Mapping[str, Any] | None = None,
    on_error: str = "raise",
) -> LabelledData:
    """Read labelled sentences.

    Args:
        source: a file or dataset as for `read_pairs`, or open Sources, read one after the other. Columns: sentence1
            and sentence2, or one of TEXT_COLUMNS; label; perhaps split.
        columns: {our name: the source's column} for sentence, sentence1, sentence2, label and split where it is not
            found by its own name.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), single sentences beside pairs, or no example left.
    """
    columns = dict(columns or {})
    sentence = columns.pop("sentence", None)
    mapping = {name: column for name, column in columns.items() if name in NAMES}
    sources = [open_source(source, mapping)] if isinstance(source, (str, os.PathLike)) else list(source)
    rows, counts, dropped = [], Counter[str](), Counter[str]()
    for opened in sources:
        found, its = kept_rows(opened, partial(_parse, opened, sentence), on_error, noun="example")
        rows += found
        dropped.update(its.pop("dropped"))
        counts.update(its)
    texts, seconds, labels, splits = (list(column) for column in zip(*rows, strict=True))
    pairs = [second for second in seconds if second is not None]
    if pairs and len(pairs) < len(rows):
        raise ValueError(f"{sources[0].name}: {len(pairs)} of {len(rows)} examples are pairs, the others are not")
    return LabelledData(texts, pairs or None, labels, splits, {**counts, "dropped": dict(dropped)})


def _parse(source: Source, sentence: Any, fields: dict[str, Any]) -> tuple[str, str | None, str, str]:
    found = source.columns.find(fields, ("label",), pair=False)
    label = fields[found["label"]]
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # what a table with holes makes of ints
    if label is None or not str(label).strip():
        raise RowProblem(f"{found['label']} is {label!r}, no class")
    split = str(fields[found["split"]]) if "split" in found else ""
    if "sentence1" in found and "sentence2" in found:
        first, second = (parse_sentence(name, fields[found[name]]) for name in ("sentence1", "sentence2"))
        return first, second, str(label).strip(), split
    column = named_column(fields, "sentence", TEXT_COLUMNS, sentence)
    return parse_sentence(column, fields[column]), None, str(label).strip(), split
