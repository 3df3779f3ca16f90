"""The guided ops in Triton: one program a row and one launch; the second sweep over a row finds it in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dtypes import wide
from ..triton_compile import Variant, signature_of

# By bytes a logit: a step is LANES x WIDTH columns, WIDTH being what a thread loads at once: 16 bytes. Where rows are
# not aligned every column is a load of its own, and eight of half precision in flight spill (Triton 3.9, sm_90 and
# sm_100): four there. Programs are large so that few rows are under way at once, and the second sweep, which goes
# backwards, finds most of its row in the L2 cache. An argmax has one sweep and needs no such care.
LANES = {2: 1024, 4: 1024, 8: 512}
WIDTH = {2: 8, 4: 4, 8: 2}
WIDTH_UNALIGNED = {2: 4, 4: 4, 8: 2}
WARPS = {2: 32, 4: 32, 8: 16}
ARGMAX_WARPS = 8
ARGMAX_COLUMNS = 2048

POINTERS = ["current", "previous", "result", "best", "of_current", "of_previous", "grad", "by_current", "by_previous"]
SCALARS = ["columns", "row_current", "row_previous", "row_grad", "column_grad", "guidance", "need_current",
           "need_previous"]  # fmt: skip
kernel = triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)


@triton.jit
def _row_of(pointer, row, UNIT: tl.constexpr):
    """Where this program's row starts; `row` is in units of UNIT elements."""
    return pointer + tl.program_id(0).to(tl.int64) * row * UNIT


@triton.jit
def _at(row, start, UNIT: tl.constexpr):
    """The step's first element. With UNIT 16 it is at a multiple of 16 bytes, and loads and stores can be wide."""
    return tl.multiple_of(row + start, 16) if UNIT == 16 else row + start


@triton.jit
def _grad_at(row, start, lane, column, UNIT: tl.constexpr):
    return _at(row, start, UNIT) + lane if UNIT == 16 else row + (start + lane) * column


@triton.jit
def _add(largest, total, x):
    """x's columns into total = sum of exp(x - largest), a row each. A largest that starts finite avoids inf - inf."""
    new = tl.maximum(largest, tl.max(x, 1))
    return new, total * tl.exp(largest - new) + tl.sum(tl.exp(x - new[:, None]), 1)


@triton.jit
def _normaliser(largest, total):
    """Over the lanes: the largest x and the log of the sum. Both 0 for a row of only -inf, so that subtracting them
    leaves -inf; the sum is NaN already where an x is NaN or +inf."""
    top = tl.max(largest, 0)
    whole = tl.sum(total * tl.exp(largest - top), 0)
    return tl.where(whole == 0, 0.0, top), tl.log(tl.where(whole == 0, 1.0, whole))


@kernel
def guided_forward(
    current, previous, result, of_current, of_previous, columns: tl.int64, row_current: tl.int64,
    row_previous: tl.int64, guidance: tl.float64, LANES: tl.constexpr, WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """p + (guidance - 1) (p - q), with p and q the log-probabilities."""
    dtype: tl.constexpr = result.dtype.element_ty
    LOWEST: tl.constexpr = -1.7976931348623157e308 if dtype == tl.float64 else -3.4028234663852886e38
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x_row = _row_of(current, row_current, UNIT)
    y_row = _row_of(previous, row_previous, UNIT)
    out = _row_of(result, columns, UNIT)
    columns = columns * UNIT
    largest_x = tl.full((LANES,), LOWEST, dtype)
    largest_y = tl.full((LANES,), LOWEST, dtype)
    total_x = tl.zeros((LANES,), dtype)
    total_y = tl.zeros((LANES,), dtype)
    for start in range(0, columns, LANES * WIDTH):
        mask = start + lane < columns
        x = tl.load(_at(x_row, start, UNIT) + lane, mask, -float("inf")).to(dtype)
        y = tl.load(_at(y_row, start, UNIT) + lane, mask, -float("inf")).to(dtype)
        largest_x, total_x = _add(largest_x, total_x, x)
        largest_y, total_y = _add(largest_y, total_y, y)
    top_x, log_x = _normaliser(largest_x, total_x)
    top_y, log_y = _normaliser(largest_y, total_y)
    row, rows = tl.program_id(0), tl.num_programs(0)
    tl.store(of_current + row, top_x)
    tl.store(of_current + rows + row, log_x)
    tl.store(of_previous + row, top_y)
    tl.store(of_previous + rows + row, log_y)
    weight = tl.full((), guidance - 1, dtype)
    last = (columns - 1) // (LANES * WIDTH) * (LANES * WIDTH)
    for back in range(0, columns, LANES * WIDTH):
        start = last - back
        mask = start + lane < columns
        x = tl.load(_at(x_row, start, UNIT) + lane, mask, 0.0, eviction_policy="evict_first").to(dtype)
        y = tl.load(_at(y_row, start, UNIT) + lane, mask, 0.0, eviction_policy="evict_first").to(dtype)
        p, q = x - top_x - log_x, y - top_y - log_y
        mixed = tl.where(x == -float("inf"), x, p + weight * (p - q))
        tl.store(_at(out, start, UNIT) + lane, mixed, mask, eviction_policy="evict_first")


@kernel
def guided_backward(
    grad, current, previous, of_current, of_previous, by_current, by_previous, columns: tl.int64,
    row_grad: tl.int64, column_grad: tl.int64, row_current: tl.int64, row_previous: tl.int64, guidance: tl.float64,
    need_current, need_previous, LANES: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """guidance (grad - softmax(current) total), and for previous the same with 1 - guidance."""
    dtype: tl.constexpr = of_current.dtype.element_ty
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0).to(tl.int64)
    x_row = _row_of(current, row_current, UNIT)
    y_row = _row_of(previous, row_previous, UNIT)
    x_out = _row_of(by_current, columns, UNIT)
    y_out = _row_of(by_previous, columns, UNIT)
    columns = columns * UNIT
    g_row = _row_of(grad, row_grad, UNIT)
    totals = tl.zeros((LANES,), dtype)
    for start in range(0, columns, LANES * WIDTH):
        mask = start + lane < columns
        x = tl.load(_at(x_row, start, UNIT) + lane, mask, -float("inf"))
        y = tl.load(_at(y_row, start, UNIT) + lane, mask, -float("inf"))
        live = (x != -float("inf")) & (y != -float("inf"))
        g = tl.load(_grad_at(g_row, start, lane, column_grad, UNIT), mask, 0.0)
        totals += tl.sum(tl.where(live, g, 0.0), 1)
    total = tl.sum(totals, 0)
    rows = tl.num_programs(0)
    top_x, log_x = tl.load(of_current + row), tl.load(of_current + rows + row)
    top_y, log_y = tl.load(of_previous + row), tl.load(of_previous + rows + row)
    for_x = tl.full((), guidance, dtype)
    for_y = tl.full((), 1 - guidance, dtype)
    last = (columns - 1) // (LANES * WIDTH) * (LANES * WIDTH)
    for back in range(0, columns, LANES * WIDTH):
        start = last - back
        mask = start + lane < columns
        x = tl.load(_at(x_row, start, UNIT) + lane, mask, -float("inf")).to(dtype)
        y = tl.load(_at(y_row, start, UNIT) + lane, mask, -float("inf")).to(dtype)
        live = (x != -float("inf")) & (y != -float("inf"))
        g = tl.where(live, tl.load(_grad_at(g_row, start, lane, column_grad, UNIT), mask, 0.0), 0.0)
        if need_current:
            p = tl.where(x == -float("inf"), 0.0, tl.exp(x - top_x - log_x))
            tl.store(_at(x_out, start, UNIT) + lane, (for_x * (g - p * total)).to(x_out.dtype.element_ty), mask)
        if need_previous:
            q = tl.where(y == -float("inf"), 0.0, tl.exp(y - top_y - log_y))
            tl.store(_at(y_out, start, UNIT) + lane, (for_y * (g - q * total)).to(y_out.dtype.element_ty), mask)


@kernel
def guided_argmax(
    current, previous, best, columns: tl.int64, row_current: tl.int64, row_previous: tl.int64, guidance: tl.float64,
    COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """First index of the largest x + (guidance - 1) (x - y), NaN being the largest; no normaliser, one sweep."""
    dtype: tl.constexpr = tl.float64 if current.dtype.element_ty == tl.float64 else tl.float32
    lane = tl.arange(0, COLUMNS)
    x_row = _row_of(current, row_current, UNIT)
    y_row = _row_of(previous, row_previous, UNIT)
    columns = columns * UNIT
    weight = tl.full((), guidance - 1, dtype)
    top = tl.full((COLUMNS,), -float("inf"), dtype)
    where = lane.to(tl.int64)  # lane 0 is the answer where all are -inf
    for start in range(0, columns, COLUMNS):
        mask = start + lane < columns
        x = tl.load(_at(x_row, start, UNIT) + lane, mask, -float("inf")).to(dtype)
        y = tl.load(_at(y_row, start, UNIT) + lane, mask, 0.0).to(dtype)
        value = tl.where(x == -float("inf"), x, x + weight * (x - y))
        better = (value > top) | ((value != value) & (top == top))
        where = tl.where(better, start + lane, where)
        top = tl.where(better, value, top)
    broken = top != top
    highest = tl.max(tl.where(broken, float("inf"), top), 0)
    any_broken = tl.max(broken.to(tl.int32), 0)
    chosen = tl.where(any_broken > 0, broken, top == highest)
    tl.store(best + tl.program_id(0), tl.min(tl.where(chosen, where, columns), 0))


def _row(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _unit(*logits: Tensor) -> int:
    """16 where every row is in one piece from a multiple of 16 bytes and elements on, so that loads can be wide;
    else 1."""
    in_one_piece = all(x.stride(1) == 1 and x.data_ptr() % 16 == 0 for x in logits)
    return 16 if in_one_piece and all(x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in logits) else 1


def _tile(size: int, unit: int) -> dict[str, int]:
    """The constants of one step, for logits of `size` bytes."""
    return {"LANES": LANES[size], "WIDTH": (WIDTH if unit == 16 else WIDTH_UNALIGNED)[size], "UNIT": unit}


def forward(current: Tensor, previous: Tensor, guidance: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = current.shape
    current, previous = _row(current), _row(previous)
    result = current.new_empty(rows, columns, dtype=wide(current.dtype))
    of_current, of_previous = result.new_empty(2, rows), result.new_empty(2, rows)
    unit = _unit(current, previous)
    with torch.cuda.device_of(current):
        guided_forward[(rows,)](
            current, previous, result, of_current, of_previous, columns // unit, current.stride(0) // unit,
            previous.stride(0) // unit, guidance, num_warps=WARPS[current.itemsize],
            **_tile(current.itemsize, unit),
        )  # fmt: skip
    return result, of_current, of_previous


def backward(
    grad: Tensor,
    current: Tensor,
    previous: Tensor,
    of_current: Tensor,
    of_previous: Tensor,
    guidance: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    rows, columns = current.shape
    current, previous = _row(current), _row(previous)
    grads = [current.new_empty(rows, columns) if need else None for need in needs]
    # A gradient that is not needed is not written; its argument only has to have the type of one.
    written = [current if g is None else g for g in grads]
    unit = _unit(current, previous, grad)
    with torch.cuda.device_of(current):
        guided_backward[(rows,)](
            grad, current, previous, of_current, of_previous, *written, columns // unit, grad.stride(0) // unit,
            grad.stride(1), current.stride(0) // unit, previous.stride(0) // unit, guidance, *map(int, needs),
            num_warps=WARPS[current.itemsize], **_tile(current.itemsize, unit),
        )  # fmt: skip
    return grads[0], grads[1]


def argmax(current: Tensor, previous: Tensor, guidance: float) -> Tensor:
    rows, columns = current.shape
    current, previous = _row(current), _row(previous)
    best = current.new_empty(rows, dtype=torch.int64)
    unit = _unit(current, previous)
    with torch.cuda.device_of(current):
        guided_argmax[(rows,)](
            current, previous, best, columns // unit, current.stride(0) // unit, previous.stride(0) // unit, guidance,
            COLUMNS=ARGMAX_COLUMNS, UNIT=unit, num_warps=ARGMAX_WARPS,
        )  # fmt: skip
    return best


def variants() -> Iterator[Variant]:
    """Every compilation that calls can cause, for triton_compile."""
    for dtype, size in (("fp16", 2), ("bf16", 2), ("fp32", 4), ("fp64", 8)):
        pointers = dict.fromkeys(POINTERS, "*fp64" if dtype == "fp64" else "*fp32") | {"best": "*i64"}
        pointers |= dict.fromkeys(("current", "previous", "by_current", "by_previous"), f"*{dtype}")
        for unit, rows in ((16, "aligned"), (1, "any")):
            for kernel in (guided_forward, guided_backward):
                name, signature = f"{kernel.__name__} {dtype} {rows}", signature_of(kernel, **pointers)
                yield Variant(name, kernel, signature, _tile(size, unit), WARPS[size])
            constants = {"COLUMNS": ARGMAX_COLUMNS, "UNIT": unit}
            signature = signature_of(guided_argmax, **pointers)
            yield Variant(f"guided_argmax {dtype} {rows}", guided_argmax, signature, constants, ARGMAX_WARPS)
