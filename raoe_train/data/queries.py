"""Queries with candidates that do and do not fit them: the files of reranking tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raoe_train.data.columns import NAMES, RowProblem, named_column, parse_sentence
from raoe_train.data.rows import Tally, each_kept
from raoe_train.data.sources import open_source

COLUMNS = {
    "query": ("query",),
    "positive": ("positive", "positives", "pos"),
    "negative": ("negative", "negatives", "neg"),
}
"""Our column names, which are MTEB's, and the names they are found by."""


@dataclass(frozen=True)
class Candidates:
    """One query's candidates, at least one of each list."""

    query: str
    positive: list[str]
    negative: list[str]


def read_candidates(
    source: str | os.PathLike[str], *, columns: Mapping[str, Any] | None = None, on_error: str = "raise"
) -> list[Candidates]:
    """Read queries with their candidates: rows with `query`, a text, `positive` and `negative`, a text or a list.

    Args:
        source: FILE or FILE#split (JSONL or parquet hold lists), or a dataset on a hub, as for `read_pairs`.
        columns: {our name: the source's column} where it is not one of COLUMNS.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it. A query without positives or
            without negatives is malformed, as there is nothing to rank.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), or no query left.
    """
    given = dict(columns or {})
    opened = open_source(source, {name: column for name, column in given.items() if name in NAMES})
    tally = Tally(on_error)
    found = list(each_kept(opened, lambda fields, _: _parse(fields, given), tally))
    tally.counts(opened, len(found), "query")
    return found


def _parse(fields: dict[str, Any], columns: Mapping[str, Any]) -> Candidates:
    names = {name: named_column(fields, name, known, columns.get(name)) for name, known in COLUMNS.items()}
    query = parse_sentence("query", fields[names["query"]])
    positive, negative = (_texts(name, fields[names[name]]) for name in ("positive", "negative"))
    return Candidates(query, positive, negative)


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise RowProblem(f"{name} is {value!r}, neither a text nor a list of texts")
    if not texts:
        raise RowProblem(f"{name} is empty: there is nothing to rank", reason=f"no {name}")
    return [parse_sentence(f"{name} {place}", text) for place, text in enumerate(texts)]
