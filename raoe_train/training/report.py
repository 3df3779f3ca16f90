"""Write plots (no display is needed) and Markdown for reports."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raoe_train.outputs import replacing

logger = logging.getLogger(__name__)

# Okabe and Ito's palette, which colour-blind readers can distinguish
COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def save(plot: Any, path: str | Path) -> None:
    """Write a figure atomically. The suffix of `path` sets the format."""
    with replacing(path) as temporary:
        plot.savefig(temporary, dpi=150)


def pictures(draw: Callable[[], list[Path]]) -> list[str]:
    """Draw plots and return the Markdown lines that show them. If matplotlib fails, return [] and log a warning."""
    try:
        return [line for plot in draw() for line in ("", f"![{plot.stem}]({plot.name})")]
    except Exception as error:  # a plot must not stop the job; matplotlib may read a name as a formula
        logger.warning("cannot draw plots: %s", error)
        return []


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return an empty line and the lines of a Markdown table. Escape untrusted text with `cell` first."""
    header, *body = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return ["", header, "|" + "---|" * len(head), *body]


def cell(text: str) -> str:
    """Escape a text for Markdown. Return one line, no part of which is read as Markdown, HTML or a URL."""
    escaped = re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;"))
    line = " ".join(re.sub(r"(?i)(:)(//)|(w)(ww\.)", r"\1\3<!-- -->\2\4", escaped).split())
    return re.sub(r"^(\d*)([#>]|[-+](?=\s|$|--)|(?<=\d)[.)](?=\s|$))", r"\1\\\2", line)  # heading, list or quote


def made_with(versions: Mapping[str, Any]) -> str:
    """Format names and versions as "torch 2.13.0, numpy 2.4"."""
    return ", ".join(cell(f"{name} {version}") for name, version in versions.items())
