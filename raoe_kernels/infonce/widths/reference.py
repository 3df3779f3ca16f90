"""The specification of info_nce_loss of several widths: a loss of its own of each prefix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._dtypes import wide
from ..._problems import Gradients
from ..problem import Problem
from ..reference import forward as one_width

# (problem, which gradients are needed) -> the loss, and the gradients.
OneWidth = Callable[[Problem, tuple[bool, ...]], tuple[Tensor, Gradients]]


def forward(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """As autograd.py says."""
    return each_width(problem, dims, weights, needs, one_width)


def each_width(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: tuple[bool, ...], loss_of: OneWidth
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """`forward` of a backend that makes one width at a time."""
    sums = [
        x.new_zeros(x.shape, dtype=wide(x.dtype)) if need and x is not None else None
        for x, need in zip(problem.rows, needs, strict=True)
    ]
    losses = []
    for width, weight in zip(dims, weights.unbind(), strict=True):
        negatives = None if problem.negatives is None else problem.negatives[:, :width]
        anchors, positives = problem.anchors[:, :width], problem.positives[:, :width]
        prefix = problem._replace(anchors=anchors, positives=positives, negatives=negatives)
        loss, grads = loss_of(prefix, (*needs, False, False))
        losses.append(loss)
        for total, gradient in zip(sums, grads, strict=False):
            if total is not None and gradient is not None:
                total[:, :width] += weight * gradient
    return torch.stack(losses), tuple(sums)
