"""Ranking sentences: lists of sentences, each further from the first than the one before, as `generate` writes them."""

from __future__ import annotations

import ast
import os
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem, as_word, parse_sentence
from raoe_train.data.sources import Source
from raoe_train.data.tables import Counts, read_table

if TYPE_CHECKING:
    from datasets import Dataset

SHORTEST = 3  # two sentences leave nothing to rank


def list_table(source: str | os.PathLike[str], *, on_error: str = "raise") -> tuple[Dataset, Counts]:
    """Read lists of sentences: rows with `sentences`, a list of texts, and perhaps an `id` and a `method`.

    Source, on_error and errors are those of read_pairs. Malformed rows are counted as "malformed row", "no list",
    "hole" (a sentence that is null, empty or no text), "shorter than 3" or "duplicate id" (the first one stays). A list
    is never closed up around a hole, because the places of its sentences are what it says.

    Returns:
        (Dataset, counts). Columns id (string; "line N" where a row has none), sentences (list of at least three
        strings, the source first), method (string; how they were written, "" where a row does not say).
    """
    lines: dict[str, int] = {}

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        sentences = parse_list(fields, source)["sentences"]
        name = f"{source.unit} {source.line}" if fields.get("id") is None else str(fields["id"])
        if name in lines:
            raise RowProblem(f"id {name!r} is that of line {lines[name]}, too", reason="duplicate id")
        lines[name] = source.line
        return {"id": name, "sentences": sentences, "method": as_word(fields.get("method"))}

    return read_table(source, parse, "list", on_error=on_error)


def parse_list(fields: dict[str, Any], source: Source) -> dict[str, list[str]]:
    """{"sentences"} of a row. The paper's authors publish theirs in a column list_sent, each list as text."""
    sentences = fields.get("sentences", fields.get("list_sent"))
    if isinstance(sentences, str) and sentences.startswith("["):
        try:
            sentences = ast.literal_eval(sentences)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise RowProblem(f"{sentences[:40]!r}… is no list of texts", reason="no list") from None
    if not isinstance(sentences, list):
        there = ", ".join(map(repr, fields))
        raise RowProblem(f"no list of sentences in a column 'sentences'; there are: {there}", reason="no list")
    for place, sentence in enumerate(sentences):
        try:
            parse_sentence(f"sentence {place}", sentence)
        except RowProblem as problem:
            raise RowProblem(f"{problem}; a list has no holes", reason="hole") from None
    if len(sentences) < SHORTEST:
        few = f"{len(sentences)} sentences, where a ranking takes at least {SHORTEST}"
        raise RowProblem(few, reason=f"shorter than {SHORTEST}")
    return {"sentences": sentences}
