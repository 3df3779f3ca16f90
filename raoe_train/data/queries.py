"""Queries with candidates that do and do not fit them: the files of reranking tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem, parse_sentence
from raoe_train.data.rows import read_table
from raoe_train.data.sources import Source, open_source

if TYPE_CHECKING:
    from datasets import Dataset


def read_candidates(
    source: str | os.PathLike[str], *, columns: Mapping[str, Any] | None = None, on_error: str = "raise"
) -> Dataset:
    """Read queries with their candidates: rows with `query`, a text, `positive` and `negative`, a text or a list.

    Args:
        source: FILE or FILE#split (JSONL or parquet hold lists), or a dataset on a hub, as for `read_pairs`.
        columns: {our name: the source's column} where it is not found by its own name.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it. A query without positives or
            without negatives is malformed, as there is nothing to rank.

    Returns:
        query (string), positive and negative (lists of at least one string).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), or no query left.
    """
    return read_table([open_source(source, columns)], _parse, "query", on_error)[0]


def _parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
    found = source.columns.find(fields, ("query", "positive", "negative"))
    query = parse_sentence("query", fields[found["query"]])
    return {"query": query, **{name: _texts(name, fields[found[name]]) for name in ("positive", "negative")}}


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise RowProblem(f"{name} is {value!r}, neither a text nor a list of texts")
    if not texts:
        raise RowProblem(f"{name} is empty: there is nothing to rank", reason=f"no {name}")
    return [parse_sentence(f"{name} {place}", text) for place, text in enumerate(texts)]
