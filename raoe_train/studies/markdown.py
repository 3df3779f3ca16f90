"""The Markdown of reports: tables, and texts in their cells."""

from __future__ import annotations

from collections.abc import Sequence


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table_head(cells: Sequence[str]) -> list[str]:
    """The first two lines of a table."""
    return [table_row(cells), "|" + "---|" * len(cells)]


def cell(text: str) -> str:
    """A text as a table shows it: in one line, with nothing in it taken for Markdown or HTML."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").split())
