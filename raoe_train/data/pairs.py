"""Sentence pairs with similarity scores and NLI labels: one schema, checked on reading."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import (
    Columns,
    LabelMap,
    parse_label,
    parse_score,
    parse_sentence,
    resolve_label_map,
)
from raoe_train.data.rows import Tally, check_on_error, each_kept, kept_rows
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import to_table

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

OPTIONAL = ("score", "label", "subset")


@dataclass(frozen=True)
class PairData:
    """Sentence pairs, column by column; every column that is there has one entry a pair.

    Attributes:
        sentence1, sentence2: the texts. For NLI, premise and hypothesis.
        score: similarity of each pair on the file's own scale (a rank needs none), or None.
        label: NLI class of each pair, 0 entailment, 1 neutral, 2 contradiction unless mapped otherwise, or
            None.
        subset: part of a benchmark that each pair is from, or None.
        counts: {"read": rows read, "kept": pairs, "other_split": rows of splits not asked for,
            "dropped": {reason: rows}}; read = kept + other_split + all dropped.
    """

    sentence1: list[str]
    sentence2: list[str]
    score: list[float] | None = None
    label: list[int] | None = None
    subset: list[str] | None = None
    counts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("sentence2", *OPTIONAL):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.sentence1):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.sentence1)} pairs")

    def __len__(self) -> int:
        return len(self.sentence1)

    def columns(self) -> dict[str, list[Any]]:
        """The columns that are there, by name, in the order sentence1, sentence2, score, label, subset."""
        named = {name: getattr(self, name) for name in ("sentence1", "sentence2", *OPTIONAL)}
        return {name: values for name, values in named.items() if values is not None}

    def to_dataset(self) -> Dataset:
        """A `datasets.Dataset` with columns sentence1, sentence2 and, where there, score (float64) and label
        (int64)."""
        from datasets import Dataset

        return Dataset.from_dict({name: values for name, values in self.columns().items() if name != "subset"})


def read_pairs(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source],
    *,
    columns: Mapping[str, str | int | None] | None = None,
    labels: LabelMap | None = None,
    score_scale: Sequence[float] | None = None,
    on_error: str = "raise",
    require: Sequence[str] = (),
) -> PairData:
    """Read sentence pairs.

    Args:
        source: FILE or FILE#split (TSV, CSV, JSONL or parquet, also .gz); "builtin#train", "builtin#dev" or
            "builtin#test" for the built-in corpus; otherwise a dataset on a hub, NAME or
            hub:OWNER/NAME[:CONFIG][#split]; or a Source, which is used up. Several sources are read one after the
            other; they must have the same columns.
        columns: {our name: the source's column} where it is not found by its own name; None in place of a
            column says to leave it unread. All columns as ints or digits: positions from 0 in a TSV or CSV
            file without a header line.
        labels: {word or int: class} in place of entailment, neutral, contradiction -> 0, 1, 2 and 0, 1, 2 ->
            themselves. A class of None leaves rows with such a label out, and counts them.
        score_scale: (lowest, highest) score there may be; None or () checks only that scores are finite.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.
        require: columns that must be there, of "score", "label", "subset".

    Rows without a gold label ("-" or -1 or empty, as SNLI and MNLI publish them) are left out and counted,
    always.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), an unknown label word or split, a column that is
            missing or found twice, or no pair left.
    """
    score_scale = _checked(score_scale, on_error, require)
    one = isinstance(source, (str, os.PathLike, Source))
    names: list[Any] = [source] if one else list(source)  # type: ignore[arg-type, list-item]
    if not names:
        raise ValueError("source names nothing to read")
    label_map = resolve_label_map(labels)
    return _concatenate(
        [_read_one(open_source(name, columns), label_map, score_scale, on_error, require) for name in names],
        names,
    )


def pair_table(
    source: str | os.PathLike[str],
    names: Sequence[str],
    *,
    columns: Mapping[str, str | int | None] | None = None,
    labels: LabelMap | None = None,
    score_scale: Sequence[float] | None = None,
    on_error: str = "raise",
    path: Path | None = None,
) -> tuple[Dataset, dict[str, Any]]:
    """(the columns `names` of a source of any size as a `datasets.Dataset`, counts): rows go one by one into an Arrow
    table, in memory or in the file `path`. Those of names that are optional must be there; the rest as read_pairs."""
    score_scale = _checked(score_scale, on_error, require := [name for name in names if name in OPTIONAL])
    label_map, opened, tally = resolve_label_map(labels), open_source(source, columns), Tally(on_error)
    rows = each_kept(opened, lambda fields: _parse(fields, opened.columns, label_map, score_scale, require), tally)
    table = to_table(arrow_types(names), rows, path)
    return table, tally.counts(opened, len(table), "pair")


def arrow_types(names: Iterable[str]) -> dict[str, str]:
    """The columns of pairs for to_table."""
    return {name: {"score": "float64", "label": "int64"}.get(name, "string") for name in names}


def _checked(score_scale: Sequence[float] | None, on_error: str, require: Sequence[str]) -> Sequence[float] | None:
    check_on_error(on_error)
    if unknown := sorted(set(require) - set(OPTIONAL)):
        raise ValueError(f"require can name {', '.join(OPTIONAL)}; got {unknown}")
    if score_scale and not (len(score_scale) == 2 and score_scale[0] < score_scale[1]):
        raise ValueError(f"score_scale must be (lowest, highest), got {score_scale!r}")
    return score_scale or None


def _read_one(
    source: Source,
    label_map: Mapping[str, int | None],
    score_scale: Sequence[float] | None,
    on_error: str,
    require: Sequence[str],
) -> PairData:
    pairs, counts = kept_rows(
        source,
        lambda fields: _parse(fields, source.columns, label_map, score_scale, require),
        on_error,
        noun="pair",
    )
    columns = {name: [pair[name] for pair in pairs] for name in pairs[0]}
    return PairData(**columns, counts=counts)


def _parse(
    fields: dict[str, Any],
    columns: Columns,
    label_map: Mapping[str, int | None],
    score_scale: Sequence[float] | None,
    require: Sequence[str],
) -> dict[str, Any]:
    found = columns.find(fields, require)
    pair: dict[str, Any] = {name: parse_sentence(name, fields.get(found[name])) for name in ("sentence1", "sentence2")}
    if "score" in found:
        pair["score"] = parse_score(fields.get(found["score"]), score_scale, found["score"])
    if "label" in found:
        pair["label"] = parse_label(fields.get(found["label"]), label_map, found["label"])
    if "subset" in found:
        pair["subset"] = str(fields.get(found["subset"]))
    return pair


def _concatenate(parts: list[PairData], names: Sequence[Any]) -> PairData:
    if len(parts) == 1:
        return parts[0]
    shared = [set(part.columns()) - {"subset"} for part in parts]
    for name, columns in zip(names, shared, strict=True):
        if columns != shared[0]:
            raise ValueError(f"{names[0]} has columns {sorted(shared[0])}, but {name} has {sorted(columns)}")
    everywhere = [name for name in parts[0].columns() if all(name in part.columns() for part in parts)]
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.counts["dropped"])
    counts: dict[str, Any] = {key: sum(part.counts[key] for part in parts) for key in ("read", "kept", "other_split")}
    joined = {name: [value for part in parts for value in part.columns()[name]] for name in everywhere}
    return PairData(**joined, counts={**counts, "dropped": dict(dropped)})
