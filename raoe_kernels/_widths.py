"""What ops that take several prefix widths share: the columns between two widths, and who has no kernels for them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from . import _native


def native_missing(device: torch.device) -> str | None:
    """Why the compiled kernels of several widths cannot run on `device`, None if they can."""
    return _native.missing(device) if device.type == "cpu" else "its kernels for a GPU take one width"


def segments(dims: tuple[int, ...]) -> list[slice]:
    """The columns that each width adds to the one before it."""
    return [slice(start, end) for start, end in pairwise((0, *dims))]


def from_here_on(widths: Tensor) -> Tensor:
    """(K, …): the sum over a width and the wider ones, which is what a segment's columns are in."""
    return widths.flip(0).cumsum(0).flip(0)
