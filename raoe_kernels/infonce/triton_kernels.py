"""info_nce_loss in Triton: tiles of logits live on chip only. Forward keeps a maximum and a sum a row; backward makes
the tiles again, once for the rows' gradient and once for the columns'. No atomics: every sum has one order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from raoe_kernels.infonce.problem import (
    Gradients,
    Problem,
    add_rows,
    columns_of,
    inverse_norms,
    losses,
    scale,
    wide,
)
from raoe_kernels.infonce.reference import split
from raoe_kernels.triton_compile import Variant, signature_of


class Tiles(NamedTuple):
    """Of a launch: rows and columns of logits a tile, depth of one step of its product, warps, and (gradient only)
    the columns of the gradient that one program makes: wider rows take several, and each makes the logits again."""

    ROWS: int
    COLUMNS: int
    DEPTH: int
    warps: int
    OUT: int = 0


# Forward and backward, per arithmetic; chosen so that nothing spills on sm_80, sm_90 and sm_100, not by time on a GPU.
# Tensor cores take tiles of 64 and more. float32 and float64 products by fused multiply-adds keep both operands of a
# step in registers, so their steps are short.
LARGE = {
    "half": (Tiles(128, 128, 64, 8), Tiles(64, 64, 64, 8, 128)),
    "tf32": (Tiles(128, 64, 32, 8), Tiles(64, 32, 32, 8, 128)),
    "fp32": (Tiles(64, 64, 16, 8), Tiles(64, 32, 16, 8, 128)),
    "fp64": (Tiles(32, 32, 16, 4), Tiles(32, 16, 16, 4, 32)),
}
# Rows that cannot be loaded 16 bytes at a time, and a mask, need an address an element: smaller tiles.
SMALL = {
    "half": (Tiles(64, 32, 32, 8), Tiles(64, 32, 32, 8, 64)),
    "tf32": (Tiles(64, 32, 32, 8), Tiles(64, 32, 32, 8, 32)),
    "fp32": (Tiles(64, 32, 16, 8), Tiles(32, 32, 16, 8, 32)),
    "fp64": (Tiles(32, 16, 16, 4), Tiles(32, 16, 16, 4, 16)),
}
# Programs that forward wants before it stops splitting the columns among them: about two a multiprocessor.
PROGRAMS = 256
NONE, MASK, IDS = 0, 1, 2  # what says which columns an anchor ignores

SCALARS = ["row_count", "column_count", "depth", "row_stride", "column_stride", "mask_row", "mask_column", "per_split"]
SCALARS += ["first", "tau"]
POINTERS = ["rows", "columns", "inverse_rows", "inverse_columns", "targets", "mask", "row_ids", "column_ids", "peak"]
POINTERS += ["others", "at_own", "stats", "factor", "grad"]


# One compilation for all numbers and alignments; what alignment gains is UNIT's to say: 16 where row
# pointers are multiples of 16 bytes, and strides and depth, which are passed in units of it, of 16 elements.
kernel = triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)


@triton.jit
def _rows_of(x, index, inside, depth_index, depth, stride, UNIT: tl.constexpr):
    """Elements depth_index of rows `index`, (rows, depths); 0 outside."""
    where = x + (index[:, None] * stride + depth_index[None, :])
    if UNIT == 16:
        where = tl.multiple_of(where, (16, 16))
    return tl.load(where, inside[:, None] & (depth_index < depth)[None, :], 0.0)


@triton.jit
def _product(x, y, sums, PRECISION: tl.constexpr):
    """sums + x y, accumulated in the dtype of sums."""
    if PRECISION == "widened":
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums)
    return tl.dot(x, y, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def _narrow(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x in a dtype that may have fewer digits; Triton's interpreter would cut off what bfloat16 rounds."""
    if PRECISION == "widened" and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _cosines(
    rows, columns, row, column, row_in, column_in, over_rows, over_columns, depth, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS) similarities. Products are of the rows as given; norms come after, in full precision."""
    dtype: tl.constexpr = over_rows.dtype
    dot = tl.zeros((ROWS, COLUMNS), dtype)
    for start in range(0, depth, DEPTH):
        part = start + tl.arange(0, DEPTH)
        x = _rows_of(rows, row, row_in, part, depth, row_stride, UNIT)
        y = _rows_of(columns, column, column_in, part, depth, column_stride, UNIT)
        dot = _product(x, tl.trans(y), dot, PRECISION)
    return dot * over_rows[:, None] * over_columns[None, :]


@triton.jit
def _ignored(
    mask, row_ids, column_ids, row, column, row_in, column_in, mask_row, mask_column, IGNORE: tl.constexpr
):
    """(ROWS, COLUMNS) of columns that the caller calls no negatives."""
    if IGNORE == 1:
        where = row[:, None] * mask_row + column[None, :] * mask_column
        return tl.load(mask + where, row_in[:, None] & column_in[None, :], 0) != 0
    ids = tl.load(row_ids + row, row_in, 0)
    return ids[:, None] == tl.load(column_ids + column, column_in, 0)[None, :]


@kernel
def info_nce_forward(
    rows, columns, inverse_rows, inverse_columns, targets, mask, row_ids, column_ids, peak, others, at_own,
    row_count, column_count, depth, row_stride: tl.int64, column_stride: tl.int64, mask_row: tl.int64,
    mask_column: tl.int64, per_split, tau: tl.float64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IGNORE: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Of some rows over one split's columns: largest logit m, sum of exp(logit - m) over all but the row's own column,
    and the own column's logit (0 where it is another split's), each to (splits, row_count)."""
    dtype: tl.constexpr = peak.dtype.element_ty
    depth, row_stride, column_stride = depth * UNIT, row_stride * UNIT, column_stride * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < row_count
    scaled = tl.load(inverse_rows + row, row_in, 0.0) * tl.full((), tau, dtype)
    target = tl.load(targets + row, row_in, -1)
    m = tl.full((ROWS,), float("-inf"), dtype)
    total = tl.zeros((ROWS,), dtype)
    own_logit = tl.zeros((ROWS,), dtype)
    begin = tl.program_id(1) * per_split
    for start in range(begin, tl.minimum(begin + per_split, column_count), COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        column_in = column < column_count
        over = tl.load(inverse_columns + column, column_in, 0.0)
        x = _cosines(rows, columns, row, column, row_in, column_in, scaled, over, depth, row_stride, column_stride,
                     ROWS, COLUMNS, DEPTH, PRECISION, UNIT)  # fmt: skip
        own = target[:, None] == column[None, :]
        counts = column_in[None, :]
        if IGNORE != 0:
            ignored = _ignored(mask, row_ids, column_ids, row, column, row_in, column_in, mask_row, mask_column, IGNORE)
            counts = counts & (own | (ignored == 0))
        x = tl.where(counts, x, float("-inf"))
        own_logit += tl.sum(tl.where(own, x, 0.0), 1)
        higher = tl.maximum(m, tl.max(x, 1))
        # A split of which nothing counts has no maximum to subtract.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(m - shift) + tl.sum(tl.where(own, 0.0, tl.exp(x - shift[:, None])), 1)
        m = higher
    place = tl.program_id(1).to(tl.int64) * row_count + row
    tl.store(peak + place, m, row_in)
    tl.store(others + place, total, row_in)
    tl.store(at_own + place, own_logit, row_in)


@kernel
def info_nce_gradient(
    rows, columns, inverse_rows, inverse_columns, targets, mask, row_ids, column_ids, stats, factor, grad,
    row_count, column_count, depth, row_stride: tl.int64, column_stride: tl.int64, mask_row: tl.int64,
    mask_column: tl.int64, first, tau: tl.float64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr,
    IGNORE: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """OUT elements of the gradients of some rows. TRANSPOSED: the rows are columns first, first + 1, … of the logits,
    and the columns are its rows.

    With w = dloss/dlogit and u = row / |row|: (tau sum of w column / |column| - (sum of w logit) u) / |row|.
    """
    dtype: tl.constexpr = inverse_rows.dtype.element_ty
    given: tl.constexpr = rows.dtype.element_ty
    depth, row_stride, column_stride = depth * UNIT, row_stride * UNIT, column_stride * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < row_count
    part = tl.program_id(1) * OUT + tl.arange(0, OUT)
    over_row = tl.load(inverse_rows + row, row_in, 0.0)
    scaled = over_row * tl.full((), tau, dtype)
    by_unit = tl.zeros((ROWS, OUT), dtype)
    along = tl.zeros((ROWS,), dtype)
    # Statistics are those of the logits' rows: shift, 1 / sum and the own column's weight, one after the other.
    count = column_count if TRANSPOSED else row_count
    for start in range(0, column_count, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        column_in = column < column_count
        over = tl.load(inverse_columns + column, column_in, 0.0)
        x = _cosines(rows, columns, row, column, row_in, column_in, scaled, over, depth, row_stride, column_stride,
                     ROWS, COLUMNS, DEPTH, PRECISION, UNIT)  # fmt: skip
        index, index_in = (column, column_in) if TRANSPOSED else (row, row_in)
        shift = tl.load(stats + index, index_in, 0.0)
        share = tl.load(stats + count + index, index_in, 0.0)
        own_weight = tl.load(stats + count + count + index, index_in, 0.0)
        target = tl.load(targets + index, index_in, -1)
        if TRANSPOSED:
            own = target[None, :] == (first + row)[:, None]
            w = tl.exp(x - shift[None, :]) * share[None, :]
            w = tl.where(own, own_weight[None, :], w)
        else:
            own = target[:, None] == column[None, :]
            w = tl.exp(x - shift[:, None]) * share[:, None]
            w = tl.where(own, own_weight[:, None], w)
        counts = row_in[:, None] & column_in[None, :]
        if IGNORE != 0:
            ignored = _ignored(mask, row_ids, column_ids, row, column, row_in, column_in, mask_row, mask_column, IGNORE)
            counts = counts & (own | (ignored == 0))
        w = tl.where(counts, w, 0.0)
        along += tl.sum(w * x, 1)
        w *= over[None, :]
        y = _rows_of(columns, column, column_in, part, depth, column_stride, UNIT)
        if given == tl.float16:
            # Weights reach below float16's range. TF32 holds all of float16's digits, and float32's exponents.
            by_unit = _product(w, y.to(tl.float32), by_unit, "tf32")
        else:
            by_unit = _product(_narrow(w, given, PRECISION), y, by_unit, PRECISION)
    unit = _rows_of(rows, row, row_in, part, depth, row_stride, UNIT).to(dtype) * over_row[:, None]
    result = (by_unit * tl.full((), tau, dtype) - along[:, None] * unit) * (over_row * tl.load(factor))[:, None]
    place = row[:, None] * depth + part[None, :]
    tl.store(grad + place, _narrow(result, grad.dtype.element_ty, PRECISION), row_in[:, None] & (part < depth)[None, :])


class _Direction(NamedTuple):
    """Rows that look for their target among columns; what a launch needs to know of them."""

    rows: Tensor
    columns: Tensor
    inverse_rows: Tensor
    inverse_columns: Tensor
    targets: Tensor
    mask: Tensor | None
    row_ids: Tensor | None
    column_ids: Tensor | None

    def back(self) -> _Direction:
        """The other direction: each row's target looks for the row."""
        mask = None if self.mask is None else self.mask[:, self.targets].T
        ids = None if self.column_ids is None else self.column_ids[self.targets]
        everyone = torch.arange(len(self.rows), device=self.rows.device)
        return _Direction(self.columns[self.targets], self.rows, self.inverse_columns[self.targets], self.inverse_rows,
                          everyone, mask, ids, self.row_ids)  # fmt: skip

    def transposed(self, wanted: slice) -> _Direction:
        """Some columns as rows, and the rows as columns; targets stay those of the rows."""
        mask = None if self.mask is None else self.mask[:, wanted].T
        ids = None if self.column_ids is None else self.column_ids[wanted]
        return _Direction(self.columns[wanted], self.rows, self.inverse_columns[wanted], self.inverse_rows,
                          self.targets, mask, ids, self.row_ids)  # fmt: skip

    def pointers(self) -> tuple[Tensor, ...]:
        """Arguments common to both kernels; what is absent is not read, and only has to have the right type."""
        return (
            self.rows, self.columns, self.inverse_rows, self.inverse_columns, self.targets,
            self.targets.view(torch.uint8) if self.mask is None else self.mask.view(torch.uint8),
            *(self.targets if ids is None else ids.contiguous() for ids in (self.row_ids, self.column_ids)),
        )  # fmt: skip

    def numbers(self) -> tuple[int, ...]:
        rows, columns = self.rows, self.columns
        strides = (0, 0) if self.mask is None else self.mask.stride()
        sizes = (x // self.unit() for x in (rows.shape[1], rows.stride(0), columns.stride(0)))
        return (len(rows), len(columns), *sizes, *strides)

    def unit(self) -> int:
        """16 where 16 bytes can be loaded at a time, 1 elsewhere."""
        both = (self.rows, self.columns)
        aligned = (x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in both)
        return 16 if all(aligned) else 1

    def constants(self) -> dict:
        ignore = NONE if self.mask is None and self.row_ids is None else IDS if self.mask is None else MASK
        return {"IGNORE": ignore, "PRECISION": _precision(self.rows.dtype), "UNIT": self.unit()}


def _precision(dtype: torch.dtype) -> str:
    """float32 products are float32's, unless torch's setting for its own matrix products allows TF32. bfloat16 is
    widened first in Triton's interpreter, which would multiply its bit patterns."""
    if dtype == torch.bfloat16 and not hasattr(info_nce_forward, "params"):
        return "widened"
    matmul = torch.backends.cuda.matmul
    setting = getattr(matmul, "fp32_precision", None)  # since torch 2.9
    allowed = matmul.allow_tf32 if setting is None else setting == "tf32"
    return "tf32" if dtype == torch.float32 and allowed else "ieee"


def _tiles(dtype: torch.dtype, constants: dict) -> tuple[Tiles, Tiles]:
    """Of forward and of backward."""
    table = LARGE if constants["UNIT"] == 16 and constants["IGNORE"] != MASK else SMALL
    if dtype.itemsize == 2:
        return table["half"]
    if dtype == torch.float64:
        return table["fp64"]
    return table["tf32" if constants["PRECISION"] == "tf32" else "fp32"]


def _shape(tiles: Tiles) -> dict[str, int]:
    """Constants of a launch."""
    shape = {"ROWS": tiles.ROWS, "COLUMNS": tiles.COLUMNS, "DEPTH": tiles.DEPTH}
    return shape | {"OUT": tiles.OUT} if tiles.OUT else shape


def _direction(problem: Problem, inverse_a: Tensor, inverse_k: Tensor, columns: Tensor) -> _Direction:
    a, k = (x if x.stride(1) == 1 else x.contiguous() for x in (problem.anchors, columns))
    return _Direction(a, k, inverse_a, inverse_k, problem.targets.contiguous(), problem.ignored, problem.anchor_ids,
                      problem.column_ids)  # fmt: skip


def _statistics(direction: _Direction, tau: float) -> tuple[Tensor, Tensor]:
    """() sum of the rows' losses; (3, rows) shift, 1 / sum, and weight of the own column in the gradient."""
    constants = direction.constants()
    tiles, _ = _tiles(direction.rows.dtype, constants)
    blocks = triton.cdiv(len(direction.rows), tiles.ROWS)
    splits = min(triton.cdiv(len(direction.columns), tiles.COLUMNS), max(1, PROGRAMS // blocks))
    per_split = triton.cdiv(triton.cdiv(len(direction.columns), splits), tiles.COLUMNS) * tiles.COLUMNS
    peak, others, at_own = direction.inverse_rows.new_empty(3, splits, len(direction.rows))
    with torch.cuda.device_of(direction.rows):
        info_nce_forward[(blocks, splits)](
            *direction.pointers(), peak, others, at_own, *direction.numbers(), per_split, tau,
            **_shape(tiles), **constants, num_warps=tiles.warps,
        )  # fmt: skip
    shift, at_own = peak.amax(0), at_own.sum(0)
    others = (others * (peak - shift).exp()).sum(0)
    of_own = (at_own - shift).exp()
    share = 1 / (others + of_own)
    return losses(others, of_own, shift, at_own).sum(), torch.stack((shift, share, -others * share))


def _gradient(
    direction: _Direction, stats: Tensor, factor: Tensor, tau: float, dtype: torch.dtype, first: int = -1
) -> Tensor:
    """Of the direction's rows, in `dtype`; with first >= 0 it is a transposed one whose rows are columns from there."""
    constants = direction.constants()
    _, tiles = _tiles(direction.rows.dtype, constants)
    grad = torch.empty(direction.rows.shape, dtype=dtype, device=direction.rows.device)
    grid = triton.cdiv(len(direction.rows), tiles.ROWS), triton.cdiv(direction.rows.shape[1], tiles.OUT)
    if grad.numel():
        with torch.cuda.device_of(direction.rows):
            info_nce_gradient[grid](
                *direction.pointers(), stats, factor, grad, *direction.numbers(), max(first, 0), tau,
                **_shape(tiles), TRANSPOSED=first >= 0, **constants, num_warps=tiles.warps,
            )  # fmt: skip
    return grad


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and what backward needs besides the problem: a few numbers a row."""
    columns = columns_of(problem)
    (inverse_a, poison_a), (inverse_k, poison_k) = inverse_norms(problem.anchors), inverse_norms(columns)
    factor = scale(problem, poison_a + poison_k)
    problem = problem._replace(targets=problem.targets.clamp(0, len(columns) - 1))
    direction = _direction(problem, inverse_a, inverse_k, columns)
    loss, stats = _statistics(direction, problem.tau)
    back_stats = None
    if problem.symmetric:
        back, back_stats = _statistics(direction.back(), problem.tau)
        loss = loss + back
    return loss * factor, (factor, inverse_a, inverse_k, stats, back_stats)


def backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype
) -> Gradients:
    factor, inverse_a, inverse_k, stats, back_stats = saved
    factor, tau, columns, positives = factor * upstream, problem.tau, columns_of(problem), len(problem.positives)
    problem = problem._replace(targets=problem.targets.clamp(0, len(columns) - 1))
    direction = _direction(problem, inverse_a, inverse_k, columns)
    by_a = by_k = None
    # One direction's gradient is written as it will be returned; the sum of two is made in full precision.
    made = wide(problem.anchors.dtype) if problem.symmetric else dtype
    wanted = slice(0 if needs[1] or problem.symmetric else positives,
                   len(columns) if needs[2] or problem.symmetric else positives)  # fmt: skip
    if needs[0]:
        by_a = _gradient(direction, stats, factor, tau, made)
    if needs[1] or needs[2]:
        by_k = _gradient(direction.transposed(wanted), stats, factor, tau, made, wanted.start)
    if problem.symmetric:
        back = direction.back()
        if by_a is not None:
            by_a += _gradient(back.transposed(slice(None)), back_stats, factor, tau, made, 0)
        if by_k is not None:
            add_rows(by_k, problem.targets, _gradient(back, back_stats, factor, tau, made))
    by_a, by_k = (None if g is None else g.to(dtype) for g in (by_a, by_k))
    if wanted.start and by_k is not None:
        return by_a, None, by_k
    return split(by_a, by_k, problem, needs)


def variants() -> Iterator[Variant]:
    """Every compilation that calls can cause, for triton_compile."""
    names = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    for name, dtype in names.items():
        exact = "fp64" if name == "fp64" else "fp32"
        pointers = dict.fromkeys(POINTERS, f"*{exact}") | {"targets": "*i64", "mask": "*u8"}
        pointers |= {"row_ids": "*i64", "column_ids": "*i64"} | dict.fromkeys(("rows", "columns"), f"*{name}")
        for precision in ("ieee", "tf32") if name == "fp32" else ("ieee",):
            shown = "tf32" if precision == "tf32" else name
            for ignore in (NONE, MASK, IDS):
                for unit in (16, 1):
                    constants = {"IGNORE": ignore, "PRECISION": precision, "UNIT": unit}
                    before, after = _tiles(dtype, constants)
                    which = f"{shown} {('all', 'mask', 'ids')[ignore]}{'' if unit == 16 else ' unaligned'}"
                    yield Variant(f"info_nce_forward {which}", info_nce_forward,
                                  signature_of(info_nce_forward, **pointers), _shape(before) | constants,
                                  before.warps)  # fmt: skip
                    # Gradients are in the rows' dtype, or wide where directions are summed or torch.compile asks.
                    for grad in sorted({name, exact}):
                        for transposed in (False, True):
                            more = {"TRANSPOSED": transposed}
                            signature = signature_of(info_nce_gradient, **(pointers | {"grad": f"*{grad}"}))
                            yield Variant(
                                f"info_nce_gradient {which}{' columns' if transposed else ' rows'} to {grad}",
                                info_nce_gradient, signature, _shape(after) | constants | more, after.warps,
                            )  # fmt: skip
