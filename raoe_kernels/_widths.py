"""Helpers for ops with several prefix widths: the columns between two widths, and the devices without kernels."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from . import _native


def native_missing(device: torch.device) -> str | None:
    """Return why the compiled kernels for several widths cannot run on `device`, or None if they can."""
    return _native.missing(device) if device.type == "cpu" else "the compiled GPU kernels support only one width"


def segments(dims: tuple[int, ...]) -> list[slice]:
    """Return for each width the slice of columns that it adds to the previous width."""
    return [slice(start, end) for start, end in pairwise((0, *dims))]


def from_here_on(widths: Tensor) -> Tensor:
    """Return (K, …), for each width the sum over it and all wider widths, which share the segment's columns."""
    return widths.flip(0).cumsum(0).flip(0)
