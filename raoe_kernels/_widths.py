"""Helpers for ops with several prefix widths. A segment is the slice of columns between two widths."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def segments(dims: tuple[int, ...]) -> list[slice]:
    """Return, for each width, its segment: the columns that this width adds to the previous width."""
    return [slice(start, end) for start, end in pairwise((0, *dims))]


def from_here_on(widths: Tensor) -> Tensor:
    """Return (K, …): for each width, the sum over this width and all wider ones, which all include its segment."""
    return widths.flip(0).cumsum(0).flip(0)
