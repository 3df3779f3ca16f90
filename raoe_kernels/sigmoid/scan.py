"""sigmoid_loss in plain torch, a chunk of rows at a time, with a bounded buffer instead of the matrix of logits.

The loss is a sum over the pairs, so the forward pass computes a chunk's gradient as soon as the chunk's logits are
known. A chunk needs three BLAS products: for the logits, the gradient of the rows and the gradient of the columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._contract import Gradients
from ..infonce.chunks import sweep
from ..infonce.problem import is_ignored, through_normalisation, units_of
from .problem import Problem, is_grouped, mean_factor, own_columns

# Size of the buffer in bytes: large enough for matrix products at full speed (512 rows of 32,768 columns in float32).
BUFFER = 64 << 20
# Size of a buffer block in bytes. All elementwise passes over one block run before the next block, to use the cache.
BLOCK = 1 << 20
# Above LINEAR, softplus(x) = log(1 + exp(x)) is computed as x, which is equal within float64's precision.
LINEAR = 80.0


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """Return the loss and the gradients that are needed, in float64 for float64 rows, otherwise in float32."""
    a, inverse_a, poison_a = units_of(problem.anchors)
    k, inverse_k, poison_k = units_of(problem.positives, problem.negatives)
    factor = mean_factor(problem, poison_a + poison_k)
    own, has_own = own_columns(problem)
    start, end = 0 if needs[1] else len(problem.positives), len(k) if needs[2] else len(problem.positives)
    part = slice(start, end) if needs[1] or needs[2] else None
    losses, weights = a.new_zeros(2, len(a))

    def weigh(first: int, logits: Tensor) -> Tensor | None:
        step = len(logits) if logits.is_cuda else max(1, BLOCK // (len(k) * k.element_size()))
        for x, begin in zip(logits.split(step), range(first, first + len(logits), step), strict=True):
            rows = slice(begin, begin + len(x))
            column, has_positive = own[rows, None], None if has_own is None else has_own[rows, None]
            group_mask, ignore_mask = is_grouped(problem, rows), is_ignored(problem, rows)
            own_logit = x.add_(problem.bias).gather(1, column)
            if ignore_mask is not None:
                x.masked_fill_(ignore_mask if group_mask is None else ignore_mask & ~group_mask, -torch.inf)
            _flip_positives(x, column, own_logit, has_positive, group_mask)
            torch.sum(F.softplus(x, threshold=LINEAR), 1, out=losses[rows])
            if any(needs):
                x.sigmoid_()
                _flip_positives(x, column, x.gather(1, column), has_positive, group_mask)
                if needs[4]:
                    torch.sum(x, 1, out=weights[rows])
        return logits if any(needs[:4]) else None

    max_rows = max(1, BUFFER // (len(k) * k.element_size()))
    by_a, by_k = sweep(a * problem.scale, k, weigh, needs[0] or needs[3], part, max_rows)
    by_scale = by_bias = by_positives = by_negatives = None
    if by_a is not None:
        by_scale = torch.linalg.vecdot(by_a, a).sum() * factor
        through_normalisation(by_a, a, inverse_a * (problem.scale * factor))
    if needs[4]:
        by_bias = weights.sum() * factor
    if by_k is not None:
        through_normalisation(by_k, k[part], inverse_k[part] * factor)
        by_positives, by_negatives = by_k.split((len(problem.positives) - start, end - len(problem.positives)))
    grads = by_a, by_positives, by_negatives, by_scale, by_bias
    return losses.sum() * factor, tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def _flip_positives(x: Tensor, column: Tensor, own_logit: Tensor, has_own: Tensor | None, group: Tensor | None) -> None:
    """In each row of x, negate the columns in the row's group in place. If the row has a positive (has_own), set its
    own column to -own_logit."""
    if group is not None:
        torch.where(group, -x, x, out=x)
    x.scatter_(1, column, -own_logit if has_own is None else torch.where(has_own, -own_logit, x.gather(1, column)))
