"""Which dtypes the ops compute in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and of losses for inputs of `dtype`: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flags(dtype: torch.dtype) -> torch.dtype:
    """The dtype of 0-or-1 numbers that a Triton kernel with products of `dtype` reads: bytes, but not beside float64.
    Triton 3.6 lays products out by the narrowest number that went into them, and doubles have no such layout."""
    return torch.int32 if dtype == torch.float64 else torch.uint8


def as_products(*rows: Tensor | None) -> tuple[Any, ...]:
    """Rows as torch's matrix products take them: float32 in autocast's dtype, where it is on."""
    device = next(x.device.type for x in rows if x is not None)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return rows
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x is not None and x.dtype == torch.float32 else x for x in rows)
