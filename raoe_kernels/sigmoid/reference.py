"""Reference implementation of sigmoid_loss and its gradient for any dtype and device, with all logits in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._contract import Gradients
from ..infonce.problem import is_ignored, split, through_normalisation, units_of
from .problem import Problem, is_grouped, mean_factor, own_columns


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """Return the loss and the gradients that are needed, in float64 for float64 rows, otherwise in float32."""
    a, inverse_a, poison_a = units_of(problem.anchors)
    k, inverse_k, poison_k = units_of(problem.positives, problem.negatives)
    factor = mean_factor(problem, poison_a + poison_k)
    cosines = a @ k.T

    own, has_own = own_columns(problem)
    positive = torch.zeros_like(cosines, dtype=torch.bool).scatter_(1, own[:, None], True)
    if has_own is not None:
        positive &= has_own[:, None]
    group_mask, ignore_mask = (function(problem, slice(None)) for function in (is_grouped, is_ignored))
    if group_mask is not None:
        positive |= group_mask
    sign = torch.where(positive, 1, -1)
    is_counted = torch.ones_like(positive) if ignore_mask is None else positive | ~ignore_mask
    x = sign * (problem.scale * cosines + problem.bias)
    loss = -F.logsigmoid(x)[is_counted].sum() * factor

    by_logits = (-sign * torch.sigmoid(-x)).masked_fill(~is_counted, 0) * factor
    by_cosines = by_logits * problem.scale
    by_a = through_normalisation(by_cosines @ k, a, inverse_a)
    by_k = through_normalisation(by_cosines.T @ a, k, inverse_k)
    grads = *split(by_a, by_k, len(problem.positives), needs), (by_logits * cosines).sum(), by_logits.sum()
    return loss, tuple(g if need else None for g, need in zip(grads, needs, strict=True))
