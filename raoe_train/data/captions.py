"""Captions by image: the files of the strict caption retrieval in the BeLLM paper's Section 5.4."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raoe_train.data.columns import NAMES, RowProblem, named_column, parse_sentence
from raoe_train.data.rows import Tally, each_kept
from raoe_train.data.sources import open_source

COLUMNS = {
    "image": ("image", "image_id", "image_name", "filename"),
    "caption": ("caption", "comment", "sentence", "text"),
}
"""Our column names and the names they are found by."""


def read_captions(
    source: str | os.PathLike[str], *, columns: Mapping[str, Any] | None = None, on_error: str = "raise"
) -> dict[str, list[str]]:
    """{image: its captions}, both in file order, of a file with one caption a row.

    Args:
        source: a file or dataset as for `read_pairs`, with columns image and caption.
        columns: {our name: the source's column} where it is not one of COLUMNS.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), or no caption left.
    """
    given = dict(columns or {})
    opened = open_source(source, {name: column for name, column in given.items() if name in NAMES})
    tally = Tally(on_error)
    rows = list(each_kept(opened, lambda fields, _: _parse(fields, given), tally))
    tally.counts(opened, len(rows), "caption")
    images: dict[str, list[str]] = {}
    for image, caption in rows:
        images.setdefault(image, []).append(caption)
    return images


def _parse(fields: dict[str, Any], columns: Mapping[str, Any]) -> tuple[str, str]:
    names = {name: named_column(fields, name, known, columns.get(name)) for name, known in COLUMNS.items()}
    image = fields[names["image"]]
    if image is None or not str(image).strip():
        raise RowProblem(f"{names['image']} is {image!r}, no image")
    return str(image).strip(), parse_sentence(names["caption"], fields[names["caption"]])
