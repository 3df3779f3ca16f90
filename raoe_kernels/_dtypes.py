"""Dtypes in which the ops compute, and helpers for autocast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic and of the losses for inputs with dtype `dtype`: float64 for float64,
    otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flags(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of 0/1 flags in a Triton kernel that multiplies matrices of `dtype`: int32 for float64, else
    uint8. Triton 3.6 derives a tl.dot's layout from the narrowest dtype, and has no layout for float64 with uint8."""
    return torch.int32 if dtype == torch.float64 else torch.uint8


def as_products(*rows: Tensor | None) -> tuple[Any, ...]:
    """Cast float32 rows to autocast's dtype if autocast is on, as torch's matrix products do."""
    if (dtype := autocast_dtype(next(x for x in rows if x is not None))) is None:
        return rows
    return tuple(x.to(dtype) if x is not None and x.dtype == torch.float32 else x for x in rows)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype, or None if autocast is off for the device of x. The device "meta" has no autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if not x.is_meta and torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> Any:
    """Return a context manager that turns off autocast, which would multiply float32 tensors in half precision."""
    return _NO_CHANGE if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


_NO_CHANGE = nullcontext()
