"""Sentence pairs with similarity scores and NLI labels: one schema, checked on reading."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import (
    LabelMap,
    RowProblem,
    optional_word,
    parse_label,
    parse_score,
    parse_sentence,
    resolve_label_map,
)
from raoe_train.data.rows import Counts, Reader, by_column, read_table
from raoe_train.data.sources import Source

if TYPE_CHECKING:
    from datasets import Dataset

TEXTS = ("sentence1", "sentence2")
OPTIONAL = ("score", "label", "subset")


def read_pairs(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source],
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: LabelMap | None = None,
    score_scale: Sequence[float] | None = None,
    on_error: str = "raise",
    require: Sequence[str] = (),
) -> Dataset:
    """Read sentence pairs.

    Args:
        source: FILE or FILE#split (TSV, CSV, JSONL or parquet, all but parquet also .gz); "builtin#train",
            "builtin#dev" or "builtin#test" for the built-in corpus; otherwise a dataset on a hub, NAME or
            `hub:OWNER/NAME[:CONFIG][#split]`; or a Source, which is used up. Several sources are read one after the
            other; they must have the same columns.
        columns: {our name: the source's column} where it is not found by its own name; None in place of a
            column says to leave it unread.
        labels: {word or int: class} in place of entailment, neutral, contradiction -> 0, 1, 2 and 0, 1, 2 ->
            themselves. A class of None leaves rows with such a label out, and counts them.
        score_scale: (lowest, highest) score there may be; None or () checks only that scores are finite.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.
        require: columns that must be there, of "score", "label", "subset". Where there are labels and no scores, the
            scores asked for are the labels', evenly from 1 of class 0 down to 0 of the largest; what numbers mean as
            such, `labels` has to say.

    Rows without a gold label ("-" or -1 or empty, as SNLI and MNLI publish them) are left out and counted,
    always.

    Returns:
        sentence1 and sentence2 (of NLI premise and hypothesis) and, where there, score (float64, on the file's own
        scale), label (int64; 0 entailment, 1 neutral, 2 contradiction unless mapped otherwise) and subset (string; the
        part of a benchmark that a pair is from).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), an unknown label word or split, a column that is
            missing or found twice, or no pair left.
    """
    asked = {"columns": columns, "labels": labels, "score_scale": score_scale, "on_error": on_error}
    return pair_table(source, require=require, **asked)[0]  # type: ignore[arg-type]


def pair_table(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source],
    names: Sequence[str] | None = None,
    *,
    columns: Mapping[str, str | None] | None = None,
    labels: LabelMap | None = None,
    score_scale: Sequence[float] | None = None,
    on_error: str = "raise",
    require: Sequence[str] = (),
    any_labels: bool = False,
) -> tuple[Dataset, Counts]:
    """(read_pairs, counts), of a source of any size. `names` are the columns to keep, which
    must be there; None keeps all. With `any_labels` those beside scores are not looked at, and not kept."""
    if unknown := sorted(set(require) - set(OPTIONAL)):
        raise ValueError(f"require can name {', '.join(OPTIONAL)}; got {unknown}")
    if score_scale and not (len(score_scale) == 2 and score_scale[0] < score_scale[1]):
        raise ValueError(f"score_scale must be (lowest, highest), got {score_scale!r}")
    readers: dict[str, Reader] = {
        **dict.fromkeys(TEXTS, parse_sentence),
        "score": partial(parse_score, scale=score_scale),
        "label": partial(parse_label, label_map=resolve_label_map(labels)),
        "subset": lambda column, value: optional_word(value),
    }
    must = (*TEXTS, *require, *(names or ()))
    plain, labelled = by_column(readers, must), by_column(readers, [name for name in must if name != "score"])
    scored = by_column({name: read for name, read in readers.items() if name != "label"}, must)
    classes = [label for label in resolve_label_map(labels).values() if label is not None]

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        there = source.columns.find(fields, TEXTS, readers)
        if "score" in there or "score" not in must or "label" not in there:
            return (scored if any_labels else plain)(fields, source)
        if labels is None and str(fields[there["label"]]).strip().removesuffix(".0").isdigit():
            raise RowProblem(
                f"{there['label']} is {fields[there['label']]}, and there is no score: say what labels mean, larger = "
                'less related, with labels {"1": 0, "0": 1}; or that they are scores, with columns '
                f"score={there['label']}"
            )
        row = labelled(fields, source)
        row["score"] = 1 - row["label"] / max(max(classes), 1)
        return row

    return read_table(source, parse, "pair", columns=columns, on_error=on_error, names=names)
