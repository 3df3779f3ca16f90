"""The files of retrieval tasks: captions by image, queries with candidates, and with a teacher's scores of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem, parse_score, parse_sentence, parse_word
from raoe_train.data.rows import Counts, by_column, read_table
from raoe_train.data.sources import Source

if TYPE_CHECKING:
    from pathlib import Path

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


def scored_tuple_table(
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, Any] | None = None,
    on_error: str = "raise",
    path: Path | None = None,
) -> tuple[Dataset, Counts]:
    """Read queries with a positive, n negatives and a teacher's 1 + n scores of them, what losses distil that
    sentence-transformers has.

    In the file, JSONL or parquet, query and positive are texts, negative is a text or a list of them, and score a list
    of numbers, the positive's first. All rows have as many negatives as the first: another number is malformed
    ("other number of negatives"). Arguments and errors are those of pair_table.

    Returns:
        (Dataset, counts). Columns query, positive, negative_1 … negative_n (strings) and label (list of 1 + n floats).
    """
    readers = {"query": parse_sentence, "positive": parse_sentence, "negative": _texts, "score": _scores}
    as_read = by_column(readers)
    sizes: list[int] = []

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        row = as_read(fields, source)
        negatives, scores = row.pop("negative"), row.pop("score")
        if len(scores) != 1 + len(negatives):
            raise RowProblem(f"{len(scores)} scores, of a positive and {len(negatives)} negatives", reason="bad score")
        sizes[:] = sizes or [len(negatives)]
        if [len(negatives)] != sizes:
            few = f"{len(negatives)} negatives where earlier rows have {sizes[0]}"
            raise RowProblem(few, reason="other number of negatives")
        return {**row, **{f"negative_{k}": text for k, text in enumerate(negatives, 1)}, "label": scores}

    return read_table(source, parse, "scored tuple", columns=columns, on_error=on_error, path=path)


def _scores(column: str, value: Any) -> list[float]:
    if not isinstance(value, list):
        raise RowProblem(f"{column} is {value!r}, not a list of numbers, the positive's first", reason="bad score")
    return [parse_score(f"{column} {place}", each) for place, each in enumerate(value)]


def _texts(column: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise RowProblem(f"{column} is {value!r}, neither a text nor a list of texts")
    if not texts:
        raise RowProblem(f"{column} is empty: there is nothing to rank", reason=f"no {column}")
    return [parse_sentence(f"{column} {place}", text) for place, text in enumerate(texts)]
