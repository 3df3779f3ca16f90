"""pairwise_cosine in Triton: one warp per row, or one program per row if there are few rows. Rows of any length are
processed in blocks of columns and read once per pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dtypes import wide
from ..triton_compile import Variant, signature_of
from ..triton_rows import kernel, root, tile, unit_of

# (rows, columns) of a step, eight elements per thread: 16 bytes of half precision. Up to FEW rows, all four warps share
# a row: an H200 holds 8,448 warps, and one warp per row would leave most of it idle.
MANY_ROWS, FEW_ROWS = (4, 256), (1, 1024)
FEW = 2048
WARPS = 4

POINTERS = ["a", "b", "c", "inverse_a", "inverse_b", "grad", "grad_a", "grad_b"]


@kernel
def cosine_forward(
    a, b, c, inverse_a, inverse_b, n, columns, row_a: tl.int64, column_a: tl.int64, row_b: tl.int64, column_b:
    tl.int64, eps: tl.float64, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = c.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    inside = rows < n
    columns = columns * UNIT
    dot = tl.zeros((ROWS, COLUMNS), dtype)
    square_a = tl.zeros((ROWS, COLUMNS), dtype)
    square_b = tl.zeros((ROWS, COLUMNS), dtype)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < columns)[None, :]
        x = tl.load(tile(a, first, row_a, start, column_a, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        y = tl.load(tile(b, first, row_b, start, column_b, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        dot += x * y
        square_a += x * x
        square_b += y * y
    norm_a = root(tl.sum(square_a, 1))
    norm_b = root(tl.sum(square_b, 1))
    bound = tl.full((), eps, dtype)
    dead = (norm_a <= bound) | (norm_b <= bound)
    over_a = tl.where(dead, 0.0, 1 / tl.where(dead, 1.0, norm_a))
    over_b = tl.where(dead, 0.0, 1 / tl.where(dead, 1.0, norm_b))
    tl.store(c + rows, tl.where(dead, 0.0, tl.sum(dot, 1) * over_a * over_b), inside)
    tl.store(inverse_a + rows, over_a, inside)
    tl.store(inverse_b + rows, over_b, inside)


@kernel
def cosine_backward(
    grad, a, b, c, inverse_a, inverse_b, grad_a, grad_b, n, columns, row_a: tl.int64, column_a: tl.int64,
    row_b: tl.int64, column_b: tl.int64, need_a, need_b, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients by dc/da = b / (|a| |b|) - c a / |a|^2, and the same with a and b exchanged."""
    dtype: tl.constexpr = c.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    inside = rows < n
    upstream = tl.load(grad + rows, inside, 0.0)
    over_a = tl.load(inverse_a + rows, inside, 0.0)
    over_b = tl.load(inverse_b + rows, inside, 0.0)
    across = (upstream * over_a * over_b)[:, None]
    along = upstream * tl.load(c + rows, inside, 0.0)
    along_a = (along * over_a * over_a)[:, None]
    along_b = (along * over_b * over_b)[:, None]
    written = columns.to(tl.int64)
    columns = columns * UNIT
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < columns)[None, :]
        x = tl.load(tile(a, first, row_a, start, column_a, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        y = tl.load(tile(b, first, row_b, start, column_b, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        if need_a:
            to_a = tile(grad_a, first, written, start, 1, ROWS, COLUMNS, UNIT)
            tl.store(to_a, (y * across - x * along_a).to(grad_a.dtype.element_ty), mask)
        if need_b:
            to_b = tile(grad_b, first, written, start, 1, ROWS, COLUMNS, UNIT)
            tl.store(to_b, (x * across - y * along_b).to(grad_b.dtype.element_ty), mask)


def _launch(a: Tensor, b: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Return (grid, columns and strides, constants) for the forward or backward launch."""
    n, columns = a.shape
    unit = unit_of(a, b)
    rows, step = FEW_ROWS if unit == 16 and n <= FEW else MANY_ROWS
    strides = a.stride(0) // unit, a.stride(1), b.stride(0) // unit, b.stride(1)
    constants = {"ROWS": rows, "COLUMNS": step, "UNIT": unit, "num_warps": WARPS}
    return (triton.cdiv(n, rows),), (columns // unit, *strides), constants


def forward(a: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    n = len(a)
    c, inverse_a, inverse_b = a.new_empty(3, n, dtype=wide(a.dtype)).unbind()
    grid, shape, constants = _launch(a, b)
    with torch.cuda.device_of(a):
        cosine_forward[grid](a, b, c, inverse_a, inverse_b, n, *shape, eps, **constants)
    return c, inverse_a, inverse_b


def backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    grad_a, grad_b = (a.new_empty(a.shape) if need else None for need in needs)
    if not any(needs):
        return None, None
    # A gradient that is not needed is never written; its argument only needs the right type.
    written = [a if g is None else g for g in (grad_a, grad_b)]
    grid, shape, constants = _launch(a, b)
    with torch.cuda.device_of(a):
        cosine_backward[grid](
            grad, a, b, c, inverse_a, inverse_b, *written, len(a), *shape, *map(int, needs), **constants
        )
    return grad_a, grad_b


def variants() -> Iterator[Variant]:
    """Every compilation that calls can cause, for triton_compile."""
    shapes = {"few aligned": (FEW_ROWS, 16), "many aligned": (MANY_ROWS, 16), "any": (MANY_ROWS, 1)}
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        pointers = dict.fromkeys(POINTERS, "*fp64" if dtype == "fp64" else "*fp32")
        pointers |= dict.fromkeys(("a", "b", "grad_a", "grad_b"), f"*{dtype}")
        for shape, ((rows, columns), unit) in shapes.items():
            constants = {"ROWS": rows, "COLUMNS": columns, "UNIT": unit}
            for function in (cosine_forward, cosine_backward):
                name = f"{function.__name__} {dtype} {shape}"
                yield Variant(name, function, signature_of(function, **pointers), constants, WARPS)
