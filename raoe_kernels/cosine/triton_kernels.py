"""pairwise_cosine in Triton: one warp per row, or one program per row if there are few rows. Rows of any length are
processed in blocks of columns and read once per pass.

For several widths, each segment of columns between two widths needs one launch. The tensor `sums` passes three numbers
per row from one launch to the next. Launches run from narrow to wide widths in the forward pass, and from wide to
narrow widths in the backward pass. Each launch reads one part of `sums` and writes another part. All warps of a program
read each number, but only one warp writes it. If this warp overwrote the number that it read, a late warp could read
the new value instead of the old one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .._widths import segments
from ..triton_rows import kernel, root, tile, unit_of
from .problem import Problem
from .reference import Saved

# (rows, columns) of a step: each thread has eight elements, 16 bytes in half precision. For at most FEW rows, all
# four warps of a program share a row: an H200 holds 8,448 warps, and one warp per row would leave most of the GPU idle.
MANY_ROWS, FEW_ROWS = (4, 256), (1, 1024)
FEW = 2048
WARPS = 4


@triton.jit
def _running(sums, value, rows, n, which: tl.constexpr, launch):
    """Add the sum from the previous launch, if there was one, to `value`, and store the result for the next launch."""
    at = sums + (3 * launch + which) * n.to(tl.int64) + rows
    value += tl.load(at - 3 * n.to(tl.int64), rows < tl.where(launch > 0, n, 0), 0.0)
    tl.store(at, value, rows < n)
    return value


@kernel
def cosine_forward(
    a, b, c, inverse_a, inverse_b, sums, n, launch, columns, row_a: tl.int64, column_a: tl.int64, row_b: tl.int64,
    column_b: tl.int64, eps: tl.float64, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = c.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    row_mask = rows < n
    columns = columns * UNIT
    dot = tl.zeros((ROWS, COLUMNS), dtype)
    square_a = tl.zeros((ROWS, COLUMNS), dtype)
    square_b = tl.zeros((ROWS, COLUMNS), dtype)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (column < columns)[None, :]
        x = tl.load(tile(a, first, row_a, start, column_a, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        y = tl.load(tile(b, first, row_b, start, column_b, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        dot += x * y
        square_a += x * x
        square_b += y * y
    norm_a = root(_running(sums, tl.sum(square_a, 1), rows, n, 0, launch))
    norm_b = root(_running(sums, tl.sum(square_b, 1), rows, n, 1, launch))
    product = _running(sums, tl.sum(dot, 1), rows, n, 2, launch)
    bound = tl.full((), eps, dtype)
    is_zero = (norm_a <= bound) | (norm_b <= bound)
    inv_a = tl.where(is_zero, 0.0, 1 / tl.where(is_zero, 1.0, norm_a))
    inv_b = tl.where(is_zero, 0.0, 1 / tl.where(is_zero, 1.0, norm_b))
    tl.store(c + rows, tl.where(is_zero, 0.0, product * inv_a * inv_b), row_mask)
    tl.store(inverse_a + rows, inv_a, row_mask)
    tl.store(inverse_b + rows, inv_b, row_mask)


@kernel
def cosine_backward(
    grad, a, b, c, inverse_a, inverse_b, sums, grad_a, grad_b, n, launch, columns, row_a: tl.int64, column_a: tl.int64,
    row_b: tl.int64, column_b: tl.int64, grad_row: tl.int64, need_a, need_b, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients: dc/da = b / (|a| |b|) - c a / |a|^2; for dc/db, exchange a and b. For each column, the
    factors of a and b are summed over all widths that include the column."""
    dtype: tl.constexpr = c.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    row_mask = rows < n
    upstream = tl.load(grad + rows, row_mask, 0.0)
    inv_a = tl.load(inverse_a + rows, row_mask, 0.0)
    inv_b = tl.load(inverse_b + rows, row_mask, 0.0)
    along = upstream * tl.load(c + rows, row_mask, 0.0)
    across = _running(sums, upstream * inv_a * inv_b, rows, n, 0, launch)[:, None]
    along_a = _running(sums, along * inv_a * inv_a, rows, n, 1, launch)[:, None]
    along_b = _running(sums, along * inv_b * inv_b, rows, n, 2, launch)[:, None]
    columns = columns * UNIT
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (column < columns)[None, :]
        x = tl.load(tile(a, first, row_a, start, column_a, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        y = tl.load(tile(b, first, row_b, start, column_b, ROWS, COLUMNS, UNIT), mask, 0.0).to(dtype)
        if need_a:
            to_a = tile(grad_a, first, grad_row, start, 1, ROWS, COLUMNS, UNIT)
            tl.store(to_a, (y * across - x * along_a).to(grad_a.dtype.element_ty), mask)
        if need_b:
            to_b = tile(grad_b, first, grad_row, start, 1, ROWS, COLUMNS, UNIT)
            tl.store(to_b, (x * across - y * along_b).to(grad_b.dtype.element_ty), mask)


def _launch(a: Tensor, b: Tensor, *grads: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Return (grid, number of columns and strides, constants) for a launch of the backward kernel if `grads` are given,
    otherwise of the forward kernel."""
    n, columns = a.shape
    unit = unit_of(a, b, *grads)
    rows, step = FEW_ROWS if unit == 16 and n <= FEW else MANY_ROWS
    strides = a.stride(0) // unit, a.stride(1), b.stride(0) // unit, b.stride(1)
    constants = {"ROWS": rows, "COLUMNS": step, "UNIT": unit, "num_warps": WARPS}
    grad_strides = [x.stride(0) // unit for x in grads[:1]]
    return (triton.cdiv(n, rows),), (columns // unit, *strides, *grad_strides), constants


def _segments(dims: tuple[int, ...] | None, *matrices: Tensor) -> list[tuple[Tensor, ...]]:
    """Return, for each segment, the segment's columns of every matrix."""
    return [matrices] if dims is None else [tuple(x[:, segment] for x in matrices) for segment in segments(dims)]


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
    a, b, eps, dims = problem
    n = len(a)
    shape = (6, n) if dims is None else (6, len(dims), n)
    c, inverse_a, inverse_b, sums, *_ = a.new_empty(shape, dtype=wide(a.dtype)).unbind()  # sums: the last three rows
    with torch.cuda.device_of(a):
        for k, (x, y) in enumerate(_segments(dims, a, b)):
            results = (c, inverse_a, inverse_b) if dims is None else (c[k], inverse_a[k], inverse_b[k])
            grid, columns, constants = _launch(x, y)
            cosine_forward[grid](x, y, *results, sums, n, k, *columns, eps, **constants)
    return c, (c, inverse_a, inverse_b)


def backward(problem: Problem, saved: Saved, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    a, b, _, dims = problem
    # Columns beyond the last width have gradient 0.
    empty = a.new_empty if dims is None or dims[-1] == a.shape[1] else a.new_zeros
    grads = [empty(a.shape) if need else None for need in needs]
    outputs = [g for g in grads if g is not None]
    # A gradient that is not needed is never written, so any tensor with the right dtype can be passed for it.
    targets = [outputs[0] if g is None else g for g in grads]
    of_rows, sums = (upstream.contiguous(), *saved), upstream.new_empty(3, *upstream.shape)
    with torch.cuda.device_of(a):
        for launch, (x, y, *to) in enumerate(reversed(_segments(dims, a, b, *targets))):
            rows = of_rows if dims is None else [tensor[-1 - launch] for tensor in of_rows]
            grid, columns, constants = _launch(x, y, *to)
            cosine_backward[grid](
                rows[0], x, y, *rows[1:], sums, *to, len(a), launch, *columns, *map(int, needs), **constants
            )  # fmt: skip
    return tuple(grads)
