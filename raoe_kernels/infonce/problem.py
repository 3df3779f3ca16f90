"""What every backend of info_nce_loss is given, and the rules about rows that they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._dtypes import wide

# A row up to this norm counts as zero: torch.nn.functional.cosine_similarity's eps.
EPS = 1e-8

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Problem(NamedTuple):
    """One call. C = P + M columns: the positives, then the negatives.

    anchors     (N, D), positives (P, D), negatives (M, D) or None: rows as given, any norm, one dtype
    targets     (N,) int64: the column that is each anchor's positive; None: anchor i's is column i
    ignored     (N, C) bool or None: columns that are no negatives of an anchor
    anchor_ids  (N,) int64 and column_ids (C,) int64, or None: the same, where two ids are equal
    symmetric   the mean of both directions
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor | None
    targets: Tensor | None
    ignored: Tensor | None
    anchor_ids: Tensor | None
    column_ids: Tensor | None
    tau: float
    symmetric: bool

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.anchors, self.positives, self.negatives

    @property
    def column_count(self) -> int:
        return len(self.positives) + (0 if self.negatives is None else len(self.negatives))


def own_columns(problem: Problem) -> Tensor:
    """(N,) int64: the column of each anchor's positive, one there is whatever was asked for."""
    if problem.targets is None:
        return torch.arange(len(problem.anchors), device=problem.anchors.device)
    return problem.targets.clamp(0, problem.column_count - 1)


def columns_of(problem: Problem) -> Tensor:
    """(C, D): positives, then negatives; a copy only where there are both."""
    if problem.negatives is None or len(problem.negatives) == 0:
        return problem.positives
    return torch.cat((problem.positives, problem.negatives))


def inverse_norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """1 / |row|, 0 for a row that counts as zero, (n,); and () 0, or NaN where a row is not finite or has no finite
    norm."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide(rows.dtype))
    return (1 / norms).masked_fill(norms <= EPS, 0), (norms * 0).sum()


def units_of(*parts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all parts over their norms, in one matrix; 1 / norm of each; and inverse_norms' poison."""
    given = [x for x in parts if x is not None]
    rows = torch.cat(given) if len(given) > 1 else given[0]
    rows = rows.to(wide(rows.dtype))
    inverse, poison = inverse_norms(rows)
    # A copy is made once: in place where there is one already.
    own = rows is not given[0]
    return rows.mul_(inverse[:, None]) if own else rows * inverse[:, None], inverse, poison


def scale(problem: Problem, poison: Tensor) -> Tensor:
    """() what multiplies the sum of the rows' losses: 1 / N, or 1 / 2N where symmetric; NaN where a row or a target is
    no good. On a GPU a target cannot be looked at without waiting for it, and NaN is better than a wrong number."""
    factor = poison + 1 / (len(problem.anchors) * (2 if problem.symmetric else 1))
    if problem.targets is None:
        return factor
    outside = ((problem.targets < 0) | (problem.targets >= problem.column_count)).any()
    return factor.masked_fill(outside, torch.nan)


def losses(others: Tensor, of_own: Tensor, shift: Tensor, at_own: Tensor) -> Tensor:
    """-log softmax(x)[own] of each row from of_own = exp(x_own - shift) and others, the sum of the other columns'.

    log(1 + others / own) keeps the digits of a small loss; where the quotient is near the end of its range, own is far
    below shift, and log(others) is the loss's smaller part.
    """
    ratio = others / of_own
    return torch.where(ratio < 1e30, ratio.log1p(), shift - at_own + others.log())


def through_normalisation(grads: Tensor, units: Tensor, inverse: Tensor) -> Tensor:
    """du/dx of u = x / |x|, transposed and applied, in place of `grads`: (g - <g, u> u) / |x|; 0 for rows that count
    as zero."""
    along = torch.linalg.vecdot(grads, units)
    return grads.addcmul_(units, along[:, None], value=-1).mul_(inverse[:, None])


def add_rows(sums: Tensor, places: Tensor, rows: Tensor) -> None:
    """sums[places[i]] += rows[i], in the same order of additions every time: on a GPU index_put sorts its indices, and
    index_add leaves the order to chance."""
    if sums.is_cuda:
        sums.index_put_((places,), rows, accumulate=True)
    else:
        sums.index_add_(0, places, rows)


def scaled(grads: Gradients, upstream: Tensor, dtype: torch.dtype) -> Gradients:
    """Gradients made in forward, times what comes from above the loss, in the rows' dtype."""
    first, second, third = (None if g is None else (g * upstream).to(dtype) for g in grads)
    return first, second, third
