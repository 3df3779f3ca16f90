"""The Markdown of pages: tables, and what stands in their cells."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, behind an empty one; what comes from outside is in a `cell` before."""
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return ["", first, "|" + "---|" * len(head), *others]


def cell(text: str) -> str:
    """A text as a page shows it: in one line, with nothing in it taken for Markdown, HTML or an address."""
    escaped = re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;"))
    return " ".join(re.sub(r"(?i)(:)(//)|(w)(ww\.)", r"\1\3<!-- -->\2\4", escaped).split())


def made_with(versions: Mapping[str, Any]) -> str:
    """ "torch 2.13.0, numpy 2.4": names and versions."""
    return ", ".join(cell(f"{name} {version}") for name, version in versions.items())
