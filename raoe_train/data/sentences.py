"""The sentences of a file, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raoe_train.data.columns import Columns, RowProblem
from raoe_train.data.files import existing_file, text_lines
from raoe_train.data.sources import Source, is_file, open_source


def read_sentences(source: str, columns: Mapping[str, Any] | None = None) -> list[str]:
    """The sentences of a source, in order; every line of a .txt file, blank ones too, so that row i is line i + 1."""
    sentences = []
    for where, sentence, problem in each_sentence(source, columns):
        if problem is not None:
            raise ValueError(f"{where}: {problem}")
        sentences.append(sentence)
    if not sentences:
        raise ValueError(f"{source}: there are no sentences")
    return sentences


def each_sentence(source: str, columns: Mapping[str, Any] | None = None) -> Iterator[tuple[str, str, str | None]]:
    """(where, sentence, None) of each row of a source, or (where, "", what is wrong with the row)."""
    if is_file(source) and source.lower().removesuffix(".gz").endswith(".txt") and not columns:
        lines = text_lines(existing_file(source))
        rows = ((number, RowProblem("not UTF-8") if line is None else {"text": line}) for number, line in lines)
        opened = Source(source, "line", Columns(), rows)
    else:
        opened = open_source(source, columns)
    for line, fields in opened.rows:
        opened.line = line
        if isinstance(fields, RowProblem):
            yield opened.place(), "", str(fields)
            continue
        try:
            column = opened.columns.find(fields, ("sentence",))["sentence"]
        except RowProblem as problem:
            raise ValueError(f"{opened.place()}: {problem}") from None
        text = fields[column]
        good = isinstance(text, str)
        problem = None if good else str(RowProblem(f"{column} is {text!r}, not a text"))
        yield opened.place(), text if good else "", problem
