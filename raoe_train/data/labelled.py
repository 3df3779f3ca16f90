"""Sentences, or pairs of them, with a class each: the files of transfer tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raoe_train.data.fields import NAMES, TEXT_COLUMNS, RowProblem, named_column, parse_sentence
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
    """

    text: list[str]
    second: list[str] | None
    label: list[str]
    split: list[str]

    def __len__(self) -> int:
        return len(self.text)


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
    rows = []
    for opened in sources:
        found, _ = kept_rows(opened, partial(_parse, opened, sentence), on_error, noun="example")
        rows += found
    texts, seconds, labels, splits = (list(column) for column in zip(*rows, strict=True))
    pairs = [second for second in seconds if second is not None]
    if pairs and len(pairs) < len(rows):
        raise ValueError(f"{sources[0].name}: {len(pairs)} of {len(rows)} examples are pairs, the others are not")
    return LabelledData(texts, pairs or None, labels, splits)


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
