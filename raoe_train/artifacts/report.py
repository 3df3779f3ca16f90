"""Plots, which need no display, and the Markdown of pages."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raoe_train.artifacts.writing import replacing

logger = logging.getLogger(__name__)

# Okabe and Ito's colours, told apart by colour-blind readers too
COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def figure(size: tuple[float, float] = (7.0, 4.2)) -> tuple[Any, Any]:
    """(a figure of matplotlib, its axes), of a size in inches."""
    # the object-oriented interface leaves the user's pyplot backend alone
    from matplotlib.figure import Figure

    plot = Figure(figsize=size, layout="constrained")
    return plot, plot.subplots()


def save(plot: Any, path: str | Path) -> None:
    """Write a figure in one step; the suffix of `path` names the format."""
    with replacing(path) as temporary:
        plot.savefig(temporary, dpi=150)


def pictures(draw: Callable[[], list[Path]]) -> list[str]:
    """Markdown lines that show the plots that `draw` makes; none, and a warning, where matplotlib cannot make them."""
    try:
        return [line for plot in draw() for line in ("", f"![{plot.stem}]({plot.name})")]
    except Exception as error:  # a name that it takes for a formula, say: no reason to lose the results
        logger.warning("no plots: %s", error)
        return []


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, behind an empty one; text from outside goes through `cell` before."""
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return ["", first, "|" + "---|" * len(head), *others]


def cell(text: str) -> str:
    """A text as a page shows it: in one line, with nothing in it taken for Markdown, HTML or an address."""
    escaped = re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;"))
    line = " ".join(re.sub(r"(?i)(:)(//)|(w)(ww\.)", r"\1\3<!-- -->\2\4", escaped).split())
    return re.sub(r"^(\d*)([#>]|[-+](?=\s|$|--)|(?<=\d)[.)](?=\s|$))", r"\1\\\2", line)  # a heading, a list, a quote


def made_with(versions: Mapping[str, Any]) -> str:
    """ "torch 2.13.0, numpy 2.4": names and versions."""
    return ", ".join(cell(f"{name} {version}") for name, version in versions.items())
