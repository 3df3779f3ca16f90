"""info_nce_loss in Triton, with Triton kernels before and after matrix products that cuBLAS computes. The forward pass
computes the gradient with respect to the scaled rows. The backward pass propagates this gradient through the rows'
norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from .._contract import Gradients
from . import triton_fused, triton_units
from .chunks import cosines, sweep, unit_rows
from .problem import HARDNESS, UNSHIFTED_SCALE, Problem, add_rows, guide_threshold, is_ignored, own_columns
from .triton_passes import IDS, MASK, NONE, UNIT, info_nce_weights
from .triton_units import INTERPRETED, Units, add_to_columns, empty_weights, half, integers_or, through_norms, units_of

# A program reads its row of logits twice. With eight elements per thread, two loads of 16 bytes are in flight. With 16
# warps, few rows are processed at a time: a 50 MB cache serves the second read for up to about 32,768 columns.
WEIGHTS = {"BLOCK": 4096, "num_warps": 16}
SHORT = {"BLOCK": 2048, "num_warps": 16}  # for float64, and for calls with a mask, whose addresses take registers


def _stretch(problem: Problem) -> float:
    """Return the factor by which float16 weights are scaled, to use more of float16's range. A weight includes the
    factors 1 / norm of the scaled row and of the scaled column. Each factor is from 1 to 2, so a weight is below 4 in
    each direction. In the second direction, the weights of anchors that share a target can add up."""
    if problem.anchors.dtype != torch.float16:
        return 1.0
    largest = 1 if not problem.symmetric else 2 if problem.targets is None else 1 + len(problem.anchors)
    return triton_units.HALF / 4 / 2.0 ** (largest - 1).bit_length()


MaskOf = Callable[[slice], Tensor]


def _guide_mask(problem: Problem) -> tuple[MaskOf, Tensor]:
    """Return a mask function and a scalar "poison". The function maps a slice of the anchors to a bool mask (n, C),
    True for columns that the guide or the caller excludes. The poison is NaN if any guide row is not finite, else 0."""
    assert problem.guide_anchors is not None
    rows, _, poison = unit_rows(problem.guide_anchors)
    columns, _, poison_columns = unit_rows(problem.guide_positives, problem.guide_negatives)
    own = own_columns(problem)[:, None]

    def mask_of(chunk: slice) -> Tensor:
        guide_cosines = cosines(rows[chunk], columns)
        mask = guide_cosines > guide_threshold(problem, guide_cosines.gather(1, own[chunk]))
        caller_mask = is_ignored(problem, chunk)
        return mask if caller_mask is None else mask.logical_or_(caller_mask)

    return mask_of, poison + poison_columns


def _pass(
    problem: Problem,
    units: Units,
    stats: Tensor,
    own_weights: Tensor | None = None,
    by_column: Tensor | None = None,
    mask_of: MaskOf | None = None,
    *,
    back: bool = False,
) -> Callable[[int, Tensor], Tensor | None]:
    """Return the callback for `chunks.sweep`. The callback turns a chunk's logits into losses and, with own_weights,
    into weights. `back` selects the second direction, from the anchors' targets (rows) to the anchors (columns)."""
    n, c, anchors = len(problem.anchors), problem.column_count, len(units.columns)
    ids = (problem.anchor_ids, problem.column_ids)
    has_mask = problem.ignored is not None or mask_of is not None
    strides = (c, 1) if mask_of is not None else (0, 0) if problem.ignored is None else problem.ignored.stride()
    column_count, places = (n, (0, anchors // UNIT.value)) if back else (c, (anchors, 0))
    if back:
        ids, strides = ids[::-1], strides[::-1]
    targets, row_ids, column_ids = integers_or(stats, problem.targets, *ids)
    learned = None if problem.learned_scale is None else problem.learned_scale.to(stats.dtype)
    mask = triton.reinterpret(stats if problem.ignored is None else problem.ignored, torch.uint8)
    gradient = own_weights is not None
    limit = problem.scale + problem.strength
    hard = 1 + HARDNESS.index(problem.hardness) if problem.hardness else 0
    is_short = has_mask or problem.anchors.dtype == torch.float64
    constants = (SHORT if is_short else WEIGHTS) | {
        "IGNORE": MASK if has_mask else NONE if ids[0] is None else IDS,
        "SHIFTED": learned is not None or limit > UNSHIFTED_SCALE, "LEARNED": learned is not None,
        "GRADIENT": gradient, "SYMMETRIC": gradient and by_column is not None, "INTERPRETED": INTERPRETED,
    }  # fmt: skip

    def weigh(first: int, logits: Tensor) -> Tensor | None:
        weights = empty_weights(logits, units, gradient)
        chunk_mask = mask if mask_of is None else mask_of(slice(first, first + len(logits))).view(torch.uint8)
        info_nce_weights[(len(logits),)](
            logits, weights, stats if own_weights is None else own_weights, units.inverse,
            stats if learned is None else learned, targets, chunk_mask, row_ids, column_ids,
            stats if by_column is None else by_column, stats, first, n, column_count, logits.shape[1] // UNIT.value,
            *places, problem.target_count, 0 if by_column is None else len(by_column),
            int(problem.targets is not None), int(back), hard, max(1, len(problem.positives)),
            0 if mask_of is None else first, *strides, problem.scale / half(units.rows.dtype) ** 2, limit,
            problem.strength / problem.scale, _stretch(problem), **constants,
        )  # fmt: skip
        return weights if gradient else None

    return weigh


def _by_column(problem: Problem, logsums: Tensor) -> Tensor:
    """Rearrange `logsums`, the log(sum of exp(logit)) of each anchor, by column. A column gets the logsum of the anchor
    whose target it is, or infinity if it is not the target of any anchor. If several anchors share a target, their
    logsums are combined so that exp(x - combined) is the sum of exp(x - logsum)."""
    if problem.targets is None:
        return logsums
    targets = own_columns(problem)
    lowest = logsums.new_full((problem.column_count,), torch.inf).scatter_reduce_(0, targets, logsums, "amin")
    sums = torch.zeros_like(lowest)
    add_rows(sums, targets, (lowest[targets] - logsums).exp())
    return lowest - sums.log()


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the loss, and a tuple of five tensors for `backward`: weights @ columns, weights^T @ rows, the weight of
    each anchor's own positive, the loss again, and the derivative with respect to a learned scale."""
    unsupported = problem.beyond_triton()
    if unsupported:
        raise RuntimeError(f"backend 'triton' cannot run info_nce_loss with {unsupported}; use backend='scan'")
    n = len(problem.anchors)
    by_column = own_weights = part = by_scale = mask_of = poison = None
    with torch.cuda.device_of(problem.anchors):
        fused = problem.fused
        units = units_of(problem.rows, problem.several, triton_fused.TILE["BLOCK_K"] if fused else UNIT.value)
        rows = units.rows[:n] if problem.several else units.rows
        loss_count = 2 if problem.symmetric else 1
        stat_count = (4 if problem.symmetric else 1) + (problem.learned_scale is not None)
        stats = units.inverse.new_empty(stat_count, n)
        if problem.symmetric:
            own = units.columns[:n] if problem.targets is None else units.columns[own_columns(problem)]
            sweep(own, units.rows, _pass(problem, units, stats, back=True))
            by_column = _by_column(problem, stats[2])
        if problem.guide_anchors is not None:
            mask_of, poison = _guide_mask(problem)
        if any(needs):
            own_weights = units.inverse.new_empty(n)
        start = 0 if needs[1] else len(problem.positives)
        if needs[1] or needs[2]:
            part = slice(start, None if needs[2] or problem.negatives is None else len(problem.positives))
        if fused:
            by_rows, by_columns = triton_fused.sweep(problem, units, stats, own_weights, needs[0], part)
        else:
            weigh = _pass(problem, units, stats, own_weights, by_column, mask_of)
            by_rows, by_columns = sweep(rows, units.columns, weigh, needs[0], part)
    if problem.targets is not None:
        # Anchors may share a target, so the terms of the own pairs are added here. Without targets, backward adds them.
        add_to_columns(by_columns, own_columns(problem) - start, rows, own_weights)
    loss = (stats[:loss_count] if stat_count > loss_count else stats).mean()
    if poison is not None:
        loss += poison.to(loss.dtype)
    if problem.learned_scale is not None:
        loss = loss.masked_fill(~(problem.learned_scale > 0), torch.nan)
        if needs[4]:
            by_scale = stats[-1].mean() / (loss_count * problem.learned_scale) + loss * 0  # NaN if the loss is NaN
    return loss, (by_rows, by_columns, own_weights, loss, by_scale)


def backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype
) -> Gradients:
    products, by_scale = saved[:4], saved[4]
    learned, count = problem.learned_scale, len(problem.anchors) * (2 if problem.symmetric else 1)
    factor = problem.scale / (count * _stretch(problem) * half(problem.anchors.dtype))
    slope = upstream if learned is None else upstream * learned.to(upstream.dtype)
    rows = through_norms(problem.rows, problem.targets, products, slope, needs[:3], dtype, factor)
    return *rows, None, None if by_scale is None else by_scale * upstream
