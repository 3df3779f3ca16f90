"""Sentences, or pairs of them, with a class each: the files of transfer tasks, of mining and of polarity scores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import optional_word, parse_sentence, parse_word
from raoe_train.data.pairs import TEXTS
from raoe_train.data.rows import Counts, read_table
from raoe_train.data.sources import Source

if TYPE_CHECKING:
    from datasets import Dataset


def labelled_table(
    source: str | os.PathLike[str] | Sequence[Source],
    *,
    columns: Mapping[str, Any] | None = None,
    on_error: str = "raise",
) -> tuple[Dataset, Counts]:
    """Read labelled sentences: sentence1 and sentence2, or sentence; label; perhaps split.

    Arguments and errors are those of read_pairs.

    Returns:
        (Dataset, counts). Columns text (the sentence, or the first of a pair), of pairs also second, label (as the file
        writes it) and split ("" where a file has no such column): strings, in file order.
    """
    return read_table(source, _parse, "example", columns=columns, on_error=on_error)


def classes(data: Dataset) -> dict[str, int]:
    """{class: how many examples}, in the order of the names."""
    return dict(sorted(Counter(data["label"][:]).items()))


def distinct(data: Dataset, counts: Mapping[str, Any]) -> tuple[Dataset, Counts]:
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
    asked = TEXTS if any(name in found for name in TEXTS) else ("sentence",)
    columns = list(source.columns.find(fields, asked).values())
    named = zip(("text", "second"), columns, strict=False)
    texts = {name: parse_sentence(column, fields[column]) for name, column in named}
    label = parse_word(found["label"], fields[found["label"]])
    return {**texts, "label": label, "split": optional_word(fields[found["split"]]) if "split" in found else ""}
