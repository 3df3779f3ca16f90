"""sigmoid_loss in Triton. cuBLAS computes the matrix products, and one Triton kernel runs between them. The forward
pass computes the gradient with respect to the scaled rows. The backward pass propagates this gradient through the rows'
norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from .._contract import Gradients
from ..infonce.chunks import sweep
from ..infonce.problem import has_several_ids
from ..infonce.triton_units import (
    HALF,
    INTERPRETED,
    Units,
    add_to_columns,
    empty_weights,
    half,
    integers_or,
    through_norms,
    units_of,
)
from .problem import Problem
from .triton_passes import IDS, MASK, NONE, UNIT, sigmoid_weights

# A program reads its row of logits once. With eight elements per thread, two 16-byte loads are in flight.
WEIGHTS = {"BLOCK": 2048, "num_warps": 8}


def _stretch(problem: Problem) -> float:
    """Return the factor by which float16 weights are scaled, to use more of float16's range. A weight includes the
    factors 1 / norm of the scaled row and of the scaled column, and its magnitude is at most 4."""
    return HALF / 4 if problem.anchors.dtype == torch.float16 else 1.0


def _pass(
    problem: Problem, units: Units, stats: Tensor, own_weights: Tensor | None
) -> Callable[[int, Tensor], Tensor | None]:
    """Return the callback for `sweep`, which turns a chunk's logits into losses and, with own_weights, into weights."""
    gradient, mask = own_weights is not None, problem.ignored
    if has_several_ids(problem):
        raise RuntimeError("backend 'triton' cannot run sigmoid_loss with several ids per row; use backend='scan'")
    tensors = (problem.anchor_ids, problem.column_ids, problem.anchor_groups, problem.column_groups)
    targets, *ids = integers_or(stats, problem.targets, *tensors)
    constants = WEIGHTS | {
        "IGNORE": MASK if mask is not None else NONE if problem.anchor_ids is None else IDS,
        "GROUPED": problem.anchor_groups is not None, "GRADIENT": gradient, "INTERPRETED": INTERPRETED,
    }  # fmt: skip

    def weigh(first: int, logits: Tensor) -> Tensor | None:
        weights = empty_weights(logits, units, gradient)
        sigmoid_weights[(len(logits),)](
            logits, weights, stats if own_weights is None else own_weights, units.inverse, problem.scale, problem.bias,
            targets, triton.reinterpret(stats if mask is None else mask, torch.uint8), *ids, stats, first,
            len(problem.anchors), problem.column_count, logits.shape[1] // UNIT.value, len(units.columns),
            int(problem.targets is not None), *((0, 0) if mask is None else mask.stride()),
            1 / half(units.rows.dtype) ** 2, _stretch(problem), **constants,
        )  # fmt: skip
        return weights if gradient else None

    return weigh


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the loss and the tensors for backward: weights @ columns, weights^T @ rows, the weight of each anchor's
    own positive, the loss, and the derivatives with respect to scale and bias."""
    n = len(problem.anchors)
    own_weights = part = None
    with torch.cuda.device_of(problem.anchors):
        units = units_of(problem.rows)
        stats = units.inverse.new_empty(3 if any(needs) else 1, n)
        if any(needs):
            own_weights = units.inverse.new_empty(n)
        start = 0 if needs[1] else len(problem.positives)
        if needs[1] or needs[2]:
            part = slice(start, None if needs[2] or problem.negatives is None else len(problem.positives))
        weigh = _pass(problem, units, stats, own_weights)
        by_rows, by_columns = sweep(units.rows, units.columns, weigh, needs[0], part)
    if problem.targets is not None:
        # Anchors may share a target, so the own pairs' terms are added here. Without targets, backward adds them.
        add_to_columns(by_columns, problem.targets - start, units.rows, own_weights)
    loss, *by_numbers = stats.mean(1).unbind()
    return loss, (by_rows, by_columns, own_weights, loss, *by_numbers)


def backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype
) -> Gradients:
    by_rows, by_columns, own_weights, loss, *by_numbers = saved
    factor = 1 / (len(problem.anchors) * _stretch(problem) * half(problem.anchors.dtype))
    products = by_rows, by_columns, own_weights, loss
    rows = through_norms(problem.rows, problem.targets, products, upstream * problem.scale, needs[:3], dtype, factor)
    return *rows, *(by * upstream if need else None for by, need in zip(by_numbers, needs[3:], strict=True))
