"""The sentences of a file, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raoe_train.data.columns import NAMES, RowProblem
from raoe_train.data.files import existing_file, text_lines
from raoe_train.data.sources import is_file, open_source


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
        for number, line in text_lines(existing_file(source)):
            yield f"{source}, line {number}", line or "", "not UTF-8" if line is None else None
        return
    opened = open_source(source, columns)
    mapped = opened.columns.mapping.get("sentence")
    column = None if mapped is None else str(mapped)
    for number, fields in opened.rows:
        where = f"{opened.name}, {opened.unit} {number}"
        if isinstance(fields, RowProblem):
            yield where, "", str(fields)
            continue
        column = column or next((name for name in NAMES["sentence"] if name in fields), None)
        if column not in fields:
            raise ValueError(
                f"{where}: no column {column or ' or '.join(NAMES['sentence'])!r}; "
                f"there are: {', '.join(fields)}; say which: columns sentence=..."
            )
        text = fields[column]
        good = isinstance(text, str)
        yield where, text if good else "", None if good else f"{column} is {text!r}, not a text"
