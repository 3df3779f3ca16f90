"""Guided ops in Triton. Rows are split into slices. Each pass takes two launches. The first launch computes the sums
for each slice (in argmax, the slice's best column). The second launch combines a row's slices and, except in argmax,
rereads the slices from the L2 cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from ..triton_rows import at, kernel, unit_of
from .problem import Problem

# {bytes per logit: columns of a slice}. Each thread loads 64 bytes per context (32 for float64) before it uses the
# first value. 8 rows of 128k bfloat16 logits give 128 programs for the 132 multiprocessors of an H200. Smaller slices
# would spend more instructions on joining sums than on logits.
COLUMNS = {2: 8192, 4: 4096, 8: 1024}
WARPS = 8
# Number of slices that are joined at once: one per thread of a warp, so that no warp needs the data of another warp.
JOINED = 32
# Bytes that the first of two launches reads. They and the second launch's output should fit into the L2 cache together.
# An L2 cache has 40 MB on an A100, 50 MB on an H100 and 60 MB on an H200.
IN_CACHE = 32 << 20


@triton.jit
def _place(first, columns, COLUMNS: tl.constexpr):
    """Return this program's row, the start of its slice, and a mask of the slice's columns that lie inside the row."""
    start = tl.program_id(1).to(tl.int64) * COLUMNS
    mask = tl.arange(0, COLUMNS) < tl.minimum(columns - start, COLUMNS).to(tl.int32)
    return first + tl.program_id(0), start, mask


@triton.jit
def _exp(x):
    """Return exp(x), computed with exp2, because tl.exp takes three more instructions to handle results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _sum_up(x, sums, place, count, dtype: tl.constexpr):
    """Store a slice's largest x and its sum of exp(x - largest). `largest` is kept finite, because inf - inf is NaN."""
    LOWEST: tl.constexpr = -1.7976931348623157e308 if dtype == tl.float64 else -3.4028234663852886e38
    largest = tl.maximum(tl.max(x, 0), tl.full((), LOWEST, dtype))
    tl.store(sums + place, largest)
    tl.store(sums + count + place, tl.sum(_exp(x - largest), 0))


@triton.jit
def _normaliser(sums, row, slices, count, JOINED: tl.constexpr, dtype: tl.constexpr):
    """Return a row's largest x and the log of its sum of exp(x - largest). Both numbers are 0 if all x are -inf, so
    that subtracting them from -inf gives -inf. The log is NaN if any x is NaN or +inf."""
    LOWEST: tl.constexpr = -1.7976931348623157e308 if dtype == tl.float64 else -3.4028234663852886e38
    place = sums + row * slices + tl.arange(0, JOINED)
    mask = tl.arange(0, JOINED) < slices
    largest, total = tl.load(place, mask, LOWEST), tl.load(place + count, mask, 0.0)
    for offset in range(JOINED, slices, JOINED):
        mask = offset + tl.arange(0, JOINED) < slices
        x = tl.load(place + offset, mask, LOWEST)
        new_max = tl.maximum(largest, x)
        total = total * _exp(largest - new_max) + tl.load(place + offset + count, mask, 0.0) * _exp(x - new_max)
        largest = new_max
    top = tl.max(largest, 0)
    full_sum = tl.sum(total * _exp(largest - top), 0)
    return tl.where(full_sum == 0, 0.0, top), tl.log(tl.where(full_sum == 0, 1.0, full_sum))


@kernel
def guided_forward_sums(
    current, previous, sums, first: tl.int64, slices: tl.int64, rows: tl.int64, columns: tl.int64,
    row_current: tl.int64, row_previous: tl.int64, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = sums.dtype.element_ty
    row, start, mask = _place(first, columns * UNIT, COLUMNS)
    lane = tl.arange(0, COLUMNS)
    x = tl.load(_slice(current, row, row_current, start, lane, UNIT), mask, -float("inf")).to(dtype)
    y = tl.load(_slice(previous, row, row_previous, start, lane, UNIT), mask, -float("inf")).to(dtype)
    count = rows * slices
    _sum_up(x, sums, row * slices + tl.program_id(1), count, dtype)
    _sum_up(y, sums + 2 * count, row * slices + tl.program_id(1), count, dtype)


@kernel
def guided_forward_mix(
    current, previous, sums, result, of_current, of_previous, first: tl.int64, slices: tl.int64, rows: tl.int64,
    columns: tl.int64, row_current: tl.int64, row_previous: tl.int64, guidance: tl.float64, COLUMNS: tl.constexpr,
    JOINED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute p + (guidance - 1) (p - q), where p and q are the log-probabilities given the current and the previous
    context."""
    dtype: tl.constexpr = result.dtype.element_ty
    row, start, mask = _place(first, columns * UNIT, COLUMNS)
    lane = tl.arange(0, COLUMNS)
    x = tl.load(
        _slice(current, row, row_current, start, lane, UNIT), mask, 0.0, eviction_policy="evict_first"
    ).to(dtype)
    y = tl.load(
        _slice(previous, row, row_previous, start, lane, UNIT), mask, 0.0, eviction_policy="evict_first"
    ).to(dtype)
    count = rows * slices
    top_x, log_x = _normaliser(sums, row, slices, count, JOINED, dtype)
    top_y, log_y = _normaliser(sums + 2 * count, row, slices, count, JOINED, dtype)
    if start == 0:
        tl.store(of_current + row, top_x)
        tl.store(of_current + rows + row, log_x)
        tl.store(of_previous + row, top_y)
        tl.store(of_previous + rows + row, log_y)
    p, q = x - top_x - log_x, y - top_y - log_y
    mixed = tl.where(x == -float("inf"), x, p + tl.full((), guidance - 1, dtype) * (p - q))
    out = _slice(result, row, columns, start, lane, UNIT)
    tl.store(out, mixed, mask, eviction_policy="evict_first")


@triton.jit
def _slice(matrix, row, step, start, lane, UNIT: tl.constexpr):
    """Return pointers to the elements start + lane of a row. `step` is the row stride divided by UNIT."""
    return at(matrix + row * step * UNIT, start, UNIT) + lane


@triton.jit
def _finite_grad(x, y, grad, row_grad, column_grad, start, lane, mask, UNIT: tl.constexpr):
    """Return the upstream gradient where the result is finite, else 0."""
    if UNIT == 16:
        place = at(grad + row_grad * UNIT, start, UNIT) + lane
    else:
        place = grad + row_grad + (start + lane) * column_grad
    is_finite = (x != -float("inf")) & (y != -float("inf"))
    return tl.where(is_finite, tl.load(place, mask, 0.0), 0.0)


@kernel
def guided_backward_sums(
    grad, current, previous, sums, first: tl.int64, slices: tl.int64, columns: tl.int64, row_grad: tl.int64,
    column_grad: tl.int64, row_current: tl.int64, row_previous: tl.int64, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, start, mask = _place(first, columns * UNIT, COLUMNS)
    lane = tl.arange(0, COLUMNS)
    x = tl.load(_slice(current, row, row_current, start, lane, UNIT), mask, -float("inf"))
    y = tl.load(_slice(previous, row, row_previous, start, lane, UNIT), mask, -float("inf"))
    g = _finite_grad(x, y, grad, row * row_grad, column_grad, start, lane, mask, UNIT)
    tl.store(sums + row * slices + tl.program_id(1), tl.sum(g, 0))


@kernel
def guided_backward_mix(
    grad, current, previous, sums, of_current, of_previous, by_current, by_previous, first: tl.int64, slices: tl.int64,
    rows: tl.int64, columns: tl.int64, row_grad: tl.int64, column_grad: tl.int64, row_current: tl.int64,
    row_previous: tl.int64, guidance: tl.float64, need_current, need_previous, COLUMNS: tl.constexpr,
    JOINED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store the gradients with respect to both contexts' logits, computed with the formulas in scan.backward."""
    dtype: tl.constexpr = of_current.dtype.element_ty
    row, start, mask = _place(first, columns * UNIT, COLUMNS)
    lane = tl.arange(0, COLUMNS)
    x = tl.load(_slice(current, row, row_current, start, lane, UNIT), mask, -float("inf")).to(dtype)
    y = tl.load(_slice(previous, row, row_previous, start, lane, UNIT), mask, -float("inf")).to(dtype)
    g = _finite_grad(x, y, grad, row * row_grad, column_grad, start, lane, mask, UNIT)
    part = tl.arange(0, JOINED)
    totals = tl.load(sums + row * slices + part, part < slices, 0.0)
    for offset in range(JOINED, slices, JOINED):
        totals += tl.load(sums + row * slices + offset + part, offset + part < slices, 0.0)
    total = tl.sum(totals, 0)
    if need_current:
        p = _exp(x - tl.load(of_current + row) - tl.load(of_current + rows + row))
        value = tl.full((), guidance, dtype) * (g - tl.where(x == -float("inf"), 0.0, p) * total)
        out = _slice(by_current, row, columns, start, lane, UNIT)
        tl.store(out, value.to(out.dtype.element_ty), mask)
    if need_previous:
        q = _exp(y - tl.load(of_previous + row) - tl.load(of_previous + rows + row))
        value = tl.full((), 1 - guidance, dtype) * (g - tl.where(y == -float("inf"), 0.0, q) * total)
        out = _slice(by_previous, row, columns, start, lane, UNIT)
        tl.store(out, value.to(out.dtype.element_ty), mask)


@triton.jit
def _best(value, index, no_index):
    """Return the largest value and the smallest `index` where it occurs. NaN counts as the largest value."""
    is_nan = value != value
    highest = tl.max(tl.where(is_nan, float("inf"), value), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    is_best = tl.where(has_nan, is_nan, value == highest)
    return tl.where(has_nan, float("nan"), highest), tl.min(tl.where(is_best, index, no_index), 0)


@kernel
def guided_argmax_slices(
    current, previous, scores, best, slices: tl.int64, columns: tl.int64, row_current: tl.int64, row_previous: tl.int64,
    guidance: tl.float64, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Find the maximum of x + (guidance - 1) (x - y) in a slice, and the first column where it occurs."""
    dtype: tl.constexpr = scores.dtype.element_ty
    row, start, mask = _place(0, columns * UNIT, COLUMNS)
    lane = tl.arange(0, COLUMNS)
    x = tl.load(_slice(current, row, row_current, start, lane, UNIT), mask, -float("inf")).to(dtype)
    y = tl.load(_slice(previous, row, row_previous, start, lane, UNIT), mask, 0.0).to(dtype)
    value = tl.where(x == -float("inf"), x, x + tl.full((), guidance - 1, dtype) * (x - y))
    highest, index = _best(value, start + lane, columns * UNIT)
    tl.store(scores + row * slices + tl.program_id(1), highest)
    tl.store(best + row * slices + tl.program_id(1), index)


@kernel
def guided_argmax_join(scores, best, result, slices: tl.int64, JOINED: tl.constexpr):
    dtype: tl.constexpr = scores.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, JOINED)
    highest = tl.full((), -float("inf"), dtype)
    index = tl.load(best + row * slices)
    for start in range(0, slices, JOINED):
        mask = start + lane < slices
        values = tl.load(scores + row * slices + start + lane, mask, -float("inf"))
        indices = tl.load(best + row * slices + start + lane, mask, 1 << 62)
        value, new_index = _best(values, indices, 1 << 62)
        better = (value > highest) | ((value != value) & (highest == highest))
        index = tl.where(better, new_index, index)
        highest = tl.where(better, value, highest)
    tl.store(result + row, index)


def _rows(*logits: Tensor) -> tuple[Tensor, ...]:
    """Return each matrix of logits, or a copy if its rows are not contiguous."""
    return tuple(x if x.stride(1) == 1 else x.contiguous() for x in logits)


def _groups(rows: int, bytes_a_row: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) for each group of rows that one pair of launches processes."""
    step = max(1, IN_CACHE // bytes_a_row)
    return ((first, min(step, rows - first)) for first in range(0, rows, step))


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    current, previous = _rows(*problem.logits)
    rows, columns = current.shape
    size, unit = current.itemsize, unit_of(current, previous)
    slices = triton.cdiv(columns, COLUMNS[size])
    result = current.new_empty(rows, columns, dtype=wide(current.dtype))
    of_current, of_previous = result.new_empty(2, rows), result.new_empty(2, rows)
    sums = result.new_empty(4, rows, slices)
    shape = columns // unit, current.stride(0) // unit, previous.stride(0) // unit
    constants = {"COLUMNS": COLUMNS[size], "UNIT": unit, "num_warps": WARPS}
    with torch.cuda.device_of(current):
        for first, group in _groups(rows, 2 * columns * size):
            grid = (group, slices)
            guided_forward_sums[grid](current, previous, sums, first, slices, rows, *shape, **constants)
            guided_forward_mix[grid](
                current, previous, sums, result, of_current, of_previous, first, slices, rows, *shape,
                problem.guidance, JOINED=JOINED, **constants,
            )  # fmt: skip
    return result, (of_current, of_previous)


def backward(problem: Problem, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    current, previous = _rows(*problem.logits)
    rows, columns = current.shape
    size, unit, needs = current.itemsize, unit_of(current, previous, upstream), problem.reads(needs)
    slices = triton.cdiv(columns, COLUMNS[size])
    grads = [current.new_empty(rows, columns) if need else None for need in needs]
    # A gradient that is not needed is never written, so any tensor with the right dtype can be passed for it.
    outputs = [current if g is None else g for g in grads]
    sums = upstream.new_empty(rows, slices)
    strides = current.stride(0) // unit, previous.stride(0) // unit
    shape = columns // unit, upstream.stride(0) // unit, upstream.stride(1), *strides
    constants = {"COLUMNS": COLUMNS[size], "UNIT": unit, "num_warps": WARPS}
    with torch.cuda.device_of(current):
        for first, group in _groups(rows, columns * (2 * size + upstream.itemsize)):
            grid = (group, slices)
            guided_backward_sums[grid](upstream, current, previous, sums, first, slices, *shape, **constants)
            guided_backward_mix[grid](
                upstream, current, previous, sums, *saved, *outputs, first, slices, rows, *shape, problem.guidance,
                *map(int, needs), JOINED=JOINED, **constants,
            )  # fmt: skip
    return tuple(grads)


def argmax(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    current, previous = _rows(*problem.logits)
    rows, columns = current.shape
    size, unit = current.itemsize, unit_of(current, previous)
    slices = triton.cdiv(columns, COLUMNS[size])
    scores = current.new_empty(rows, slices, dtype=wide(current.dtype))
    best = current.new_empty(rows, slices, dtype=torch.int64)
    result = current.new_empty(rows, dtype=torch.int64)
    with torch.cuda.device_of(current):
        guided_argmax_slices[(rows, slices)](
            current, previous, scores, best, slices, columns // unit, current.stride(0) // unit,
            previous.stride(0) // unit, problem.guidance, COLUMNS=COLUMNS[size], UNIT=unit, num_warps=WARPS,
        )  # fmt: skip
        guided_argmax_join[(rows,)](scores, best, result, slices, JOINED=JOINED, num_warps=1)
    return result, ()
