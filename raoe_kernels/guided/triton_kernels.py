"""The guided ops in Triton: one program a row and one launch; the second sweep over a row finds it in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from raoe_kernels.triton_compile import Variant, signature_of

# 8 elements a thread: one 16-byte load of half-precision logits a context. float64 has a quarter of the threads'
# elements, since every running value takes two registers.
COLUMNS = {2: 4096, 4: 4096, 8: 1024}
WARPS = {2: 16, 4: 16, 8: 8}

POINTERS = ["current", "previous", "result", "best", "of_current", "of_previous", "grad", "by_current", "by_previous"]
SCALARS = ["columns", "row_current", "row_previous", "row_grad", "column_grad", "guidance", "need_current",
           "need_previous"]  # fmt: skip
kernel = triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)


@triton.jit
def _aligned(pointer, row, columns, ALIGNED: tl.constexpr):
    """Whether every row starts at a multiple of 16 elements is known on the host; here it makes wide loads."""
    if ALIGNED:
        return tl.multiple_of(pointer, 16) + tl.program_id(0).to(tl.int64) * tl.multiple_of(row, 16)
    return pointer + tl.program_id(0).to(tl.int64) * row


@triton.jit
def _count(columns, ALIGNED: tl.constexpr):
    return tl.multiple_of(columns, 16) if ALIGNED else columns


@triton.jit
def _add(largest, total, x):
    """One more x a lane to total = sum of exp(x - largest). A largest that starts finite avoids -inf minus -inf."""
    step = x - largest
    shrink = tl.exp(-tl.abs(step))
    return tl.maximum(largest, x), tl.where(step > 0, total * shrink + 1, total + shrink)


@triton.jit
def _normaliser(largest, total):
    """Over the lanes: the largest x and the log of the sum. Both 0 for a row of only -inf, so that subtracting them
    leaves -inf, and NaN where an x is +inf."""
    top = tl.max(largest, 0)
    whole = tl.sum(total * tl.exp(largest - top), 0)
    whole = tl.where(top == float("inf"), float("nan"), whole)
    return tl.where(whole == 0, 0.0, top), tl.log(tl.where(whole == 0, 1.0, whole))


@kernel
def guided_forward(
    current, previous, result, of_current, of_previous, columns: tl.int64, row_current: tl.int64,
    row_previous: tl.int64, guidance: tl.float64, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """p + (guidance - 1) (p - q), with p and q the log-probabilities."""
    dtype: tl.constexpr = result.dtype.element_ty
    LOWEST: tl.constexpr = -1.7976931348623157e308 if dtype == tl.float64 else -3.4028234663852886e38
    lane = tl.arange(0, COLUMNS)
    columns = _count(columns, ALIGNED)
    x_row = _aligned(current, row_current, columns, ALIGNED)
    y_row = _aligned(previous, row_previous, columns, ALIGNED)
    out = _aligned(result, columns, columns, ALIGNED)
    largest_x = tl.full((COLUMNS,), LOWEST, dtype)
    largest_y = tl.full((COLUMNS,), LOWEST, dtype)
    total_x = tl.zeros((COLUMNS,), dtype)
    total_y = tl.zeros((COLUMNS,), dtype)
    for start in range(0, columns, COLUMNS):
        mask = start + lane < columns
        x = tl.load(x_row + start + lane, mask, -float("inf")).to(dtype)
        y = tl.load(y_row + start + lane, mask, -float("inf")).to(dtype)
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
    for start in range(0, columns, COLUMNS):
        mask = start + lane < columns
        x = tl.load(x_row + start + lane, mask, 0.0).to(dtype)
        p = x - top_x - log_x
        q = tl.load(y_row + start + lane, mask, 0.0).to(dtype) - top_y - log_y
        mixed = tl.where(x == -float("inf"), x, p + weight * (p - q))
        tl.store(out + start + lane, mixed, mask)


@kernel
def guided_backward(
    grad, current, previous, of_current, of_previous, by_current, by_previous, columns: tl.int64,
    row_grad: tl.int64, column_grad: tl.int64, row_current: tl.int64, row_previous: tl.int64, guidance: tl.float64,
    need_current, need_previous, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """guidance (grad - softmax(current) total), and for previous the same with 1 - guidance."""
    dtype: tl.constexpr = of_current.dtype.element_ty
    lane = tl.arange(0, COLUMNS)
    columns = _count(columns, ALIGNED)
    row = tl.program_id(0).to(tl.int64)
    x_row = _aligned(current, row_current, columns, ALIGNED)
    y_row = _aligned(previous, row_previous, columns, ALIGNED)
    x_out = _aligned(by_current, columns, columns, ALIGNED)
    y_out = _aligned(by_previous, columns, columns, ALIGNED)
    g_row = grad + row * row_grad
    totals = tl.zeros((COLUMNS,), dtype)
    for start in range(0, columns, COLUMNS):
        mask = start + lane < columns
        x = tl.load(x_row + start + lane, mask, -float("inf"))
        y = tl.load(y_row + start + lane, mask, -float("inf"))
        live = (x != -float("inf")) & (y != -float("inf"))
        totals += tl.load(g_row + (start + lane) * column_grad, live & mask, 0.0)
    total = tl.sum(totals, 0)
    rows = tl.num_programs(0)
    top_x, log_x = tl.load(of_current + row), tl.load(of_current + rows + row)
    top_y, log_y = tl.load(of_previous + row), tl.load(of_previous + rows + row)
    for_x = tl.full((), guidance, dtype)
    for_y = tl.full((), 1 - guidance, dtype)
    for start in range(0, columns, COLUMNS):
        mask = start + lane < columns
        x = tl.load(x_row + start + lane, mask, -float("inf")).to(dtype)
        y = tl.load(y_row + start + lane, mask, -float("inf")).to(dtype)
        live = (x != -float("inf")) & (y != -float("inf"))
        g = tl.load(g_row + (start + lane) * column_grad, live & mask, 0.0)
        if need_current:
            p = tl.where(x == -float("inf"), 0.0, tl.exp(x - top_x - log_x))
            tl.store(x_out + start + lane, (for_x * (g - p * total)).to(x_out.dtype.element_ty), mask)
        if need_previous:
            q = tl.where(y == -float("inf"), 0.0, tl.exp(y - top_y - log_y))
            tl.store(y_out + start + lane, (for_y * (g - q * total)).to(y_out.dtype.element_ty), mask)


@kernel
def guided_argmax(
    current, previous, best, columns: tl.int64, row_current: tl.int64, row_previous: tl.int64, guidance: tl.float64,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """First index of the largest x + (guidance - 1) (x - y), NaN being the largest; no normaliser, one sweep."""
    dtype: tl.constexpr = tl.float64 if current.dtype.element_ty == tl.float64 else tl.float32
    lane = tl.arange(0, COLUMNS)
    columns = _count(columns, ALIGNED)
    x_row = _aligned(current, row_current, columns, ALIGNED)
    y_row = _aligned(previous, row_previous, columns, ALIGNED)
    weight = tl.full((), guidance - 1, dtype)
    top = tl.full((COLUMNS,), -float("inf"), dtype)
    where = lane.to(tl.int64)  # lane 0 is the answer where all are -inf
    for start in range(0, columns, COLUMNS):
        mask = start + lane < columns
        x = tl.load(x_row + start + lane, mask, -float("inf")).to(dtype)
        y = tl.load(y_row + start + lane, mask, 0.0).to(dtype)
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


def _constants(logits: tuple[Tensor, ...]) -> dict[str, int | bool]:
    """COLUMNS, warps, and whether wide loads are allowed: rows that start at multiples of 16 elements."""
    size = logits[0].dtype.itemsize
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in logits)
    return {"COLUMNS": COLUMNS[size], "ALIGNED": aligned, "num_warps": WARPS[size]}


def forward(current: Tensor, previous: Tensor, guidance: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = current.shape
    current, previous = _row(current), _row(previous)
    dtype = torch.float64 if current.dtype == torch.float64 else torch.float32
    result = current.new_empty(rows, columns, dtype=dtype)
    of_current, of_previous = result.new_empty(2, rows), result.new_empty(2, rows)
    with torch.cuda.device_of(current):
        guided_forward[(rows,)](
            current, previous, result, of_current, of_previous, columns, current.stride(0), previous.stride(0),
            guidance, **_constants((current, previous)),
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
    with torch.cuda.device_of(current):
        guided_backward[(rows,)](
            grad, current, previous, of_current, of_previous, *written, columns, *grad.stride(), current.stride(0),
            previous.stride(0), guidance, *map(int, needs), **_constants((current, previous)),
        )  # fmt: skip
    return grads[0], grads[1]


def argmax(current: Tensor, previous: Tensor, guidance: float) -> Tensor:
    rows, columns = current.shape
    current, previous = _row(current), _row(previous)
    best = current.new_empty(rows, dtype=torch.int64)
    with torch.cuda.device_of(current):
        guided_argmax[(rows,)](
            current, previous, best, columns, current.stride(0), previous.stride(0), guidance,
            **_constants((current, previous)),
        )  # fmt: skip
    return best


def variants() -> Iterator[Variant]:
    """Every compilation that calls can cause, for triton_compile."""
    for dtype, size in (("fp16", 2), ("bf16", 2), ("fp32", 4), ("fp64", 8)):
        pointers = dict.fromkeys(POINTERS, "*fp64" if dtype == "fp64" else "*fp32") | {"best": "*i64"}
        pointers |= dict.fromkeys(("current", "previous", "by_current", "by_previous"), f"*{dtype}")
        for kernel in (guided_forward, guided_backward, guided_argmax):
            for aligned in (True, False):
                constants = {"COLUMNS": COLUMNS[size], "ALIGNED": aligned}
                name = f"{kernel.__name__} {dtype} {'aligned' if aligned else 'any'}"
                yield Variant(name, kernel, signature_of(kernel, **pointers), constants, WARPS[size])
