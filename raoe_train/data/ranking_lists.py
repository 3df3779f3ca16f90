"""Ranking sentences: lists whose sentences go further and further from the first, as `generate` writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import RowProblem, parse_sentence
from raoe_train.data.files import Row
from raoe_train.data.rows import read_table
from raoe_train.data.sources import Source, open_source

if TYPE_CHECKING:
    from datasets import Dataset

SHORTEST = 3  # of two sentences each ranks the other after itself, whatever a model thinks of them


def list_table(source: str | os.PathLike[str], *, on_error: str = "raise") -> tuple[Dataset, dict[str, Any]]:
    """Read lists of sentences: rows with `sentences`, a list of texts, and an `id` if they have one.

    Args:
        source: FILE or FILE#split (JSONL or parquet, also .gz), or a dataset on a hub, as for `read_pairs`. Of
            other columns only `method` is read.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Malformed, by the reason they are counted under: "cut off" (a last line that is no JSON, as a killed job may leave
    it), "malformed row", "no list", "hole" (a sentence that is null, empty or no text), "shorter than 3", "duplicate
    id" (the first one stays). A list is never shortened or closed up around a hole: the places of its sentences are
    what it says. Blank lines are left out and counted, always.

    Returns:
        (Dataset, counts). Columns id (string; "line N" where a row has none), sentences (list of at least three
        strings, the source first), method (string; how they were written, "" where a row does not say). Counts as of
        read_table, and "sentences", how many all lists have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), or no list left.
    """
    lines: dict[str, int] = {}

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        sentences = _sentences(fields)
        name = f"{source.unit} {source.line}" if fields.get("id") is None else str(fields["id"])
        if name in lines:
            raise RowProblem(f"id {name!r} is that of line {lines[name]}, too", reason="duplicate id")
        lines[name] = source.line
        return {"id": name, "sentences": sentences, "method": str(fields.get("method", ""))}

    opened = open_source(source)
    opened.rows = _ending(opened.rows)
    table, counts = read_table([opened], parse, "list", on_error)
    return table, counts | {"sentences": sum(map(len, table["sentences"][:]))}


def _ending(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, of which a last one that is no JSON is told from others."""
    held: list[Row] = []
    for row in rows:
        yield from held
        held = [row]
    for line, fields in held:
        if isinstance(fields, RowProblem) and str(fields).startswith("not JSON"):
            advice = "Run the job that writes the file again, which finishes it, or leave the line out with on_error"
            fields = RowProblem(f"{fields}: the last line is cut off. {advice} skip", reason="cut off")
        yield line, fields


def _sentences(fields: dict[str, Any]) -> list[str]:
    sentences = fields.get("sentences")
    if not isinstance(sentences, list):
        there = ", ".join(map(repr, fields))
        raise RowProblem(f"no list of sentences in a column 'sentences'; there are: {there}", reason="no list")
    for place, sentence in enumerate(sentences):
        try:
            parse_sentence(f"sentence {place}", sentence)
        except RowProblem as problem:
            raise RowProblem(f"{problem}; a list has no holes", reason="hole") from None
    if len(sentences) < SHORTEST:
        raise RowProblem(
            f"{len(sentences)} sentences, where a ranking takes at least {SHORTEST}", reason=f"shorter than {SHORTEST}"
        )
    return sentences
