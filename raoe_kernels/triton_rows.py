"""Helpers shared by all Triton kernels: compilation without specialization, and row loads of 16 bytes per thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


def kernel(function: Callable[..., None]) -> Any:
    """Compile a kernel once for all values and alignments of its arguments, except those marked tl.constexpr."""
    names = [p.name for p in signature(function).parameters.values() if p.annotation != "tl.constexpr"]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


@cache
def has_99_kib(device: torch.device) -> bool:
    """Return whether a thread block has only 99 KiB of shared memory (GPUs of compute capability 8.6, 8.9 and 12.x)."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return major == 12 or (major, minor) in ((8, 6), (8, 9))


@triton.jit
def root(x):
    """Return the square root of x, rounded as torch rounds it."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


def unit_of(*matrices: Tensor) -> int:
    """Return UNIT, the number by which the row strides and the numbers of columns are divided before a kernel receives
    them. UNIT is 16 if all rows are contiguous and 16-byte aligned, and all these numbers are multiples of 16.
    Otherwise, UNIT is 1."""
    in_one_piece = all(x.stride(1) == 1 and x.data_ptr() % 16 == 0 for x in matrices)
    return 16 if in_one_piece and all(x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in matrices) else 1


@triton.jit
def at(row, start, UNIT: tl.constexpr):
    """Return a pointer to element `start` of a row. If UNIT is 16, mark the pointer as 16-byte aligned, so that the
    compiler emits wide loads."""
    return tl.multiple_of(row + start, 16) if UNIT == 16 else row + start


@triton.jit
def tile(matrix, first, row, start, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr):
    """Return pointers to a tile of ROWS x COLUMNS elements that begins at row `first` and column `start`. `row` is the
    row stride divided by UNIT. `column` is the column stride, used only if UNIT is 1."""
    rows, lane = tl.arange(0, ROWS)[:, None] * (row * UNIT), tl.arange(0, COLUMNS)[None, :]
    if UNIT == 16:
        return at(matrix + first * row * UNIT, start, UNIT) + rows + lane
    return matrix + first * row + rows + (start + lane) * column
