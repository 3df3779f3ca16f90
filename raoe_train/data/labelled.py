"""Sentences, or pairs of them, with a class each: the files of transfer tasks, of mining and of polarity scores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import NAMES, TEXT_COLUMNS, RowProblem, named_column, parse_sentence
from raoe_train.data.rows import read_table
from raoe_train.data.sources import Source, open_source

if TYPE_CHECKING:
    from datasets import Dataset


def read_labelled(
    source: str | os.PathLike[str] | Sequence[Source],
    *,
    columns: Mapping[str, Any] | None = None,
    on_error: str = "raise",
) -> Dataset:
    """Read labelled sentences.

    Args:
        source: a file or dataset as for `read_pairs`, or open Sources, read one after the other. Columns: sentence1
            and sentence2, or one of TEXT_COLUMNS; label; perhaps split.
        columns: {our name: the source's column} for sentence, sentence1, sentence2, label and split where it is not
            found by its own name.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Returns:
        text (the sentence, or the first of a pair), of pairs also second, label (as the file writes it) and split (""
        where a file has no such column): strings, in file order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), single sentences beside pairs, or no example left.
    """
    return labelled_table(source, columns=columns, on_error=on_error)[0]


def labelled_table(
    source: str | os.PathLike[str] | Sequence[Source],
    *,
    columns: Mapping[str, Any] | None = None,
    on_error: str = "raise",
) -> tuple[Dataset, dict[str, Any]]:
    """(read_labelled, counts), see read_table."""
    columns = dict(columns or {})
    parse = partial(_parse, sentence=columns.pop("sentence", None))
    mapping = {name: column for name, column in columns.items() if name in NAMES}
    sources = [open_source(source, mapping)] if isinstance(source, (str, os.PathLike)) else list(source)
    return read_table(sources, parse, "example", on_error)


def classes(data: Dataset) -> dict[str, int]:
    """{class: how many examples}, in the order of the names."""
    return dict(sorted(Counter(data["label"][:]).items()))


def distinct(data: Dataset, counts: Mapping[str, Any]) -> tuple[Dataset, dict[str, Any]]:
    """(each text once, and none that stands there with two classes, as it says nothing of either; counts, to which what
    is left out is added as "duplicate" and "two labels")."""
    texts, labels = data["text"][:], data["label"][:]
    first: dict[str, int] = {}
    torn: set[str] = set()
    for place, text in enumerate(texts):
        if labels[first.setdefault(text, place)] != labels[place]:
            torn.add(text)
    kept = [place for text, place in first.items() if text not in torn]
    two = sum(text in torn for text in texts)
    left_out = {"two labels": two, "duplicate": len(texts) - two - len(kept)}
    dropped = counts.get("dropped", {}) | {reason: rows for reason, rows in left_out.items() if rows}
    return data.select(kept), {**counts, "kept": len(kept), "dropped": dropped}


def _parse(fields: dict[str, Any], source: Source, sentence: Any) -> dict[str, str]:
    found = source.columns.find(fields, ("label",), pair=False)
    label = fields[found["label"]]
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # what a table with holes makes of ints
    if label is None or not str(label).strip():
        raise RowProblem(f"{found['label']} is {label!r}, no class")
    if "sentence1" in found and "sentence2" in found:
        texts = [parse_sentence(name, fields[found[name]]) for name in ("sentence1", "sentence2")]
    else:
        column = named_column(fields, "sentence", TEXT_COLUMNS, sentence)
        texts = [parse_sentence(column, fields[column])]
    split = str(fields[found["split"]]) if "split" in found else ""
    return {**dict(zip(("text", "second"), texts, strict=False)), "label": str(label).strip(), "split": split}
