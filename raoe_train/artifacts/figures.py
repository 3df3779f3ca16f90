"""What all plots share: figures that need no display, colours, files written whole or not at all."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raoe_train.artifacts.writing import replacing

logger = logging.getLogger(__name__)

# Okabe and Ito's colours, told apart by colour-blind readers too
COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 4.2)) -> tuple[Any, Any]:
    """(a figure of matplotlib, its axes), of a size in inches; axes as Figure.subplots gives them."""
    # the object-oriented interface leaves the user's pyplot backend alone
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    return made, made.subplots(rows, columns)


def save(made: Any, path: str | Path) -> None:
    """Write a figure in one step; the suffix of `path` names the format."""
    with replacing(path) as temporary:
        made.savefig(temporary, dpi=150)


def colours(count: int) -> list[str]:
    """So many colours, COLOURS from the first on and round again."""
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def pictures(draw: Callable[[], list[Path]]) -> list[str]:
    """Markdown lines that show the plots that `draw` makes; none where there is nothing to draw with."""
    try:
        made = draw()
    except ImportError as error:
        logger.warning("no plots: %s", error)
        return []
    return [line for plot in made for line in ("", f"![{plot.stem}]({plot.name})")]
