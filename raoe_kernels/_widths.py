"""Helpers for ops with several prefix widths: the columns between two widths."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def segments(dims: tuple[int, ...]) -> list[slice]:
    """Return for each width the slice of columns that it adds to the previous width."""
    return [slice(start, end) for start, end in pairwise((0, *dims))]


def from_here_on(widths: Tensor) -> Tensor:
    """Return (K, …), for each width the sum over it and all wider widths, which share the segment's columns."""
    return widths.flip(0).cumsum(0).flip(0)
