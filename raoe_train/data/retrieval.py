"""The files of retrieval tasks: captions by image, and queries with candidates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem, parse_sentence, parse_word
from raoe_train.data.rows import by_column, read_table

if TYPE_CHECKING:
    from datasets import Dataset


def read_captions(
    source: str | os.PathLike[str], *, columns: Mapping[str, Any] | None = None, on_error: str = "raise"
) -> dict[str, list[str]]:
    """{image: its captions}, both in file order, of a file with one caption a row, columns image and caption.

    Arguments and errors are those of read_pairs. These are the files of the strict caption retrieval in the BeLLM
    paper's Section 5.4.
    """
    parse = by_column({"image": parse_word, "caption": parse_sentence})
    table, _ = read_table(source, parse, "caption", columns=columns, on_error=on_error)
    images: dict[str, list[str]] = {}
    for image, caption in zip(table["image"][:], table["caption"][:], strict=True):
        images.setdefault(image, []).append(caption)
    return images


def read_candidates(
    source: str | os.PathLike[str], *, columns: Mapping[str, Any] | None = None, on_error: str = "raise"
) -> Dataset:
    """Queries with candidates that do and do not fit them: query (string), positive and negative (lists of at least one
    string).

    In the file, JSONL or parquet, positive and negative are a text or a list of texts. A query without positives or
    without negatives is malformed, as there is nothing to rank. Arguments and errors are those of read_pairs.
    """
    parse = by_column({"query": parse_sentence, "positive": _texts, "negative": _texts})
    return read_table(source, parse, "query", columns=columns, on_error=on_error)[0]


def _texts(column: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise RowProblem(f"{column} is {value!r}, neither a text nor a list of texts")
    if not texts:
        raise RowProblem(f"{column} is empty: there is nothing to rank", reason=f"no {column}")
    return [parse_sentence(f"{column} {place}", text) for place, text in enumerate(texts)]
