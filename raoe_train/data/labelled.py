"""Sentences, or pairs of them, with a class each: the files of transfer tasks, of mining and of polarity scores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem, as_word, parse_sentence
from raoe_train.data.pairs import TEXTS
from raoe_train.data.rows import read_table
from raoe_train.data.sources import Source, open_source

if TYPE_CHECKING:
    from datasets import Dataset


def labelled_table(
    source: str | os.PathLike[str] | Sequence[Source],
    *,
    columns: Mapping[str, Any] | None = None,
    on_error: str = "raise",
) -> tuple[Dataset, dict[str, Any]]:
    """Read labelled sentences.

    Args:
        source: a file or dataset as for `read_pairs`, or open Sources, read one after the other. Columns: sentence1
            and sentence2, or sentence; label; perhaps split.
        columns: {our name: the source's column} for sentence, sentence1, sentence2, label and split where it is not
            found by its own name.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Returns:
        (Dataset, counts as of read_table). Columns text (the sentence, or the first of a pair), of pairs also second,
        label (as the file writes it) and split ("" where a file has no such column): strings, in file order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), single sentences beside pairs, or no example left.
    """
    sources = [open_source(source, columns)] if isinstance(source, (str, os.PathLike)) else list(source)
    return read_table(sources, _parse, "example", on_error)


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


def _parse(fields: dict[str, Any], source: Source) -> dict[str, str]:
    found = source.columns.find(fields, ("label",), (*TEXTS, "split"))
    label = as_word(fields[found["label"]])
    if not label:
        raise RowProblem(f"{found['label']} is {fields[found['label']]!r}, no class")
    if all(name in found for name in TEXTS):
        texts = [parse_sentence(name, fields[found[name]]) for name in TEXTS]
    else:
        column = str(source.columns.column(fields, "sentence", required=True))
        texts = [parse_sentence(column, fields[column])]
    split = str(fields[found["split"]]) if "split" in found else ""
    return {**dict(zip(("text", "second"), texts, strict=False)), "label": label, "split": split}
