"""Tables and lists of versions in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.studies.jobs import cell


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return an empty line and the lines of a Markdown table. Escape untrusted text with `cell` first."""
    header, *body = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return ["", header, "|" + "---|" * len(head), *body]


def made_with(versions: Mapping[str, Any]) -> str:
    """Format names and versions as "torch 2.13.0, numpy 2.4"."""
    return ", ".join(cell(f"{name} {version}") for name, version in versions.items())
