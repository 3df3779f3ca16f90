"""The Markdown of reports: tables, and what stands in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, behind an empty one."""
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return ["", first, "|" + "---|" * len(head), *others]


def cell(text: str) -> str:
    """A text as a table shows it: in one line, with nothing in it taken for Markdown or HTML."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").split())


def number(value: float | None, digits: int = 2) -> str:
    """A dash for what is undefined, None or NaN."""
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def made_with(versions: Mapping[str, Any]) -> str:
    """ "torch 2.13.0, numpy 2.4": names and versions."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
