"""Captions by image: the files of the strict caption retrieval in the BeLLM paper's Section 5.4."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raoe_train.data.columns import RowProblem, parse_sentence
from raoe_train.data.rows import read_table
from raoe_train.data.sources import Source, open_source


def read_captions(
    source: str | os.PathLike[str], *, columns: Mapping[str, Any] | None = None, on_error: str = "raise"
) -> dict[str, list[str]]:
    """{image: its captions}, both in file order, of a file with one caption a row.

    Args:
        source: a file or dataset as for `read_pairs`, with columns image and caption.
        columns: {our name: the source's column} where it is not found by its own name.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), or no caption left.
    """
    table, _ = read_table([open_source(source, columns)], _parse, "caption", on_error)
    images: dict[str, list[str]] = {}
    for image, caption in zip(table["image"][:], table["caption"][:], strict=True):
        images.setdefault(image, []).append(caption)
    return images


def _parse(fields: dict[str, Any], source: Source) -> dict[str, str]:
    found = source.columns.find(fields, ("image", "caption"))
    image = fields[found["image"]]
    if image is None or not str(image).strip():
        raise RowProblem(f"{found['image']} is {image!r}, no image")
    return {"image": str(image).strip(), "caption": parse_sentence(found["caption"], fields[found["caption"]])}
