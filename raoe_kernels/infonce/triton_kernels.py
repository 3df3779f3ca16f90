"""info_nce_loss in Triton: what is launched on what, in tiles that are chosen here. Forward keeps a maximum and a sum a
row; backward makes the logits again, once for the rows' gradient and once for the columns'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .._dtypes import flags, wide
from ..triton_compile import Variant, signature_of
from .problem import (
    Gradients,
    Problem,
    add_rows,
    columns_of,
    inverse_norms,
    losses,
    scale,
)
from .reference import split
from .triton_logits import (
    IDS,
    MASK,
    NONE,
    POINTERS,
    UNIT,
    info_nce_forward,
    info_nce_gradient,
)


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
PLAIN = {
    "half": (Tiles(128, 64, 64, 8), Tiles(64, 64, 64, 8, 128)),
    "tf32": (Tiles(128, 64, 32, 8), Tiles(64, 32, 32, 8, 128)),
    "fp32": (Tiles(64, 64, 16, 8), Tiles(64, 32, 16, 8, 128)),
    "fp64": (Tiles(32, 32, 16, 4), Tiles(32, 16, 16, 4, 32)),
}
# Where there is a mask, whose strides are any: an address for each of its elements takes registers.
MASKED = {
    "half": (Tiles(64, 32, 32, 8), Tiles(64, 32, 32, 8, 64)),
    "tf32": (Tiles(64, 32, 32, 8), Tiles(64, 32, 32, 8, 32)),
    "fp32": (Tiles(64, 32, 16, 8), Tiles(32, 32, 16, 8, 32)),
    "fp64": (Tiles(32, 16, 16, 4), Tiles(32, 16, 16, 4, 16)),
}
# Programs that forward wants before it stops splitting the columns among them: about two a multiprocessor.
PROGRAMS = 256


class _Direction(NamedTuple):
    """Rows that look for their target among columns; what a launch needs to know of them. `width` is their length
    without the zeros at their ends."""

    width: int
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
        return _Direction(self.width, self.columns[self.targets], self.rows, self.inverse_columns[self.targets],
                          self.inverse_rows, everyone, mask, ids, self.row_ids)  # fmt: skip

    def transposed(self, wanted: slice) -> _Direction:
        """Some columns as rows, and the rows as columns; targets stay those of the rows."""
        mask = None if self.mask is None else self.mask[:, wanted].T
        ids = None if self.column_ids is None else self.column_ids[wanted]
        return _Direction(self.width, self.columns[wanted], self.rows, self.inverse_columns[wanted], self.inverse_rows,
                          self.targets, mask, ids, self.row_ids)  # fmt: skip

    def pointers(self) -> tuple[Tensor, ...]:
        """Arguments common to both kernels; what is absent is not read, and only has to have the right type."""
        return (
            self.rows, self.columns, self.inverse_rows, self.inverse_columns, self.targets,
            (self.targets if self.mask is None else self.mask).view(flags(self.rows.dtype)),
            *(self.targets if ids is None else ids.contiguous() for ids in (self.row_ids, self.column_ids)),
        )  # fmt: skip

    def numbers(self) -> tuple[int, ...]:
        rows, columns = self.rows, self.columns
        strides = (0, 0) if self.mask is None else self.mask.stride()
        sizes = (x // UNIT.value for x in (rows.shape[1], rows.stride(0), columns.stride(0)))
        return (len(rows), len(columns), *sizes, *strides)

    def constants(self) -> dict:
        ignore = NONE if self.mask is None and self.row_ids is None else IDS if self.mask is None else MASK
        return {"IGNORE": ignore, "PRECISION": _precision(self.rows.dtype)}


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
    table = MASKED if constants["IGNORE"] == MASK else PLAIN
    if dtype.itemsize == 2:
        return table["half"]
    if dtype == torch.float64:
        return table["fp64"]
    return table["tf32" if constants["PRECISION"] == "tf32" else "fp32"]


def _shape(tiles: Tiles) -> dict[str, Any]:
    """Constants of a launch."""
    shape = {"ROWS": tiles.ROWS, "COLUMNS": tiles.COLUMNS, "DEPTH": tiles.DEPTH}
    return shape | {"OUT": tiles.OUT} if tiles.OUT else shape


def _direction(problem: Problem, inverse_a: Tensor, inverse_k: Tensor, columns: Tensor) -> _Direction:
    mask = problem.ignored
    if mask is not None:
        dtype = flags(problem.anchors.dtype)
        mask = mask.view(dtype) if dtype == torch.uint8 else mask.to(dtype)
    return _Direction(problem.anchors.shape[1], _aligned(problem.anchors), _aligned(columns), inverse_a, inverse_k,
                      problem.targets.contiguous(), mask, problem.anchor_ids, problem.column_ids)  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    """Rows as the kernels take them: as they are, or a copy with zeros to the next multiple of UNIT."""
    rows, width = x.shape
    if x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) % UNIT.value == 0 and width % UNIT.value == 0:
        return x
    copy = x.new_zeros(rows, triton.cdiv(width, UNIT.value) * UNIT.value)
    copy[:, :width] = x
    return copy


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
    grad = torch.empty(len(direction.rows), direction.width, dtype=dtype, device=direction.rows.device)
    grid = triton.cdiv(len(direction.rows), tiles.ROWS), triton.cdiv(direction.width, tiles.OUT)
    if grad.numel():
        with torch.cuda.device_of(direction.rows):
            info_nce_gradient[grid](
                *direction.pointers(), stats, factor, grad, *direction.numbers(), direction.width, max(first, 0), tau,
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
        pointers = dict.fromkeys(POINTERS, f"*{exact}") | {"targets": "*i64"}
        pointers |= {"mask": "*i32" if name == "fp64" else "*u8"}
        pointers |= {"row_ids": "*i64", "column_ids": "*i64"} | dict.fromkeys(("rows", "columns"), f"*{name}")
        for precision in ("ieee", "tf32") if name == "fp32" else ("ieee",):
            shown = "tf32" if precision == "tf32" else name
            for ignore in (NONE, MASK, IDS):
                constants = {"IGNORE": ignore, "PRECISION": precision}
                before, after = _tiles(dtype, constants)
                which = f"{shown} {('all', 'mask', 'ids')[ignore]}"
                yield Variant(f"info_nce_forward {which}", info_nce_forward,
                              signature_of(info_nce_forward, **pointers), _shape(before) | constants,
                              before.warps)  # fmt: skip
                # Gradients are in the rows' dtype, or wide where directions are summed or torch.compile asks.
                for grad in sorted({name, exact}):
                    for transposed in (False, True):
                        signature = signature_of(info_nce_gradient, **(pointers | {"grad": f"*{grad}"}))
                        yield Variant(
                            f"info_nce_gradient {which}{' columns' if transposed else ' rows'} to {grad}",
                            info_nce_gradient, signature,
                            _shape(after) | constants | {"TRANSPOSED": transposed}, after.warps,
                        )  # fmt: skip
