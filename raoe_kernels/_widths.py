"""Helpers for ops with several prefix widths. A segment is the slice of columns between two neighbouring widths."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def segments(dims: tuple[int, ...]) -> list[slice]:
    """Return the segment of each width: the columns that the width adds to the previous width."""
    return [slice(start, end) for start, end in pairwise((0, *dims))]


def from_here_on(widths: Tensor) -> Tensor:
    """Return a (K, …) tensor whose entry k is the sum of the entries k to K - 1 of `widths`. Entries k to K - 1 belong
    to the widths that include segment k."""
    return widths.flip(0).cumsum(0).flip(0)
