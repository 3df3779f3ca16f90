"""The specification of info_nce_loss and of its gradient, with every logit in memory. Any dtype, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import wide
from .problem import (
    Gradients,
    Problem,
    columns_of,
    inverse_norms,
    own_columns,
    scale,
    scaled,
    through_normalisation,
)


def is_ignored(problem: Problem) -> Tensor | None:
    """(N, C) columns that the caller calls no negatives."""
    if problem.anchor_ids is not None and problem.column_ids is not None:
        return problem.anchor_ids[:, None] == problem.column_ids
    return problem.ignored


def direction(logits: Tensor, targets: Tensor, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum over the rows of -log softmax(logits)[target], and its gradient by the logits."""
    own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, targets[:, None], True)
    if ignored is not None:
        logits = logits.masked_fill(ignored & ~own, -torch.inf)
    log_softmax = logits - logits.logsumexp(1, keepdim=True)
    return -log_softmax[own].sum(), log_softmax.exp() - own.to(logits.dtype)


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """The loss, and the gradients that are needed, in float64 for float64 rows and in float32 otherwise."""
    a, k = problem.anchors, columns_of(problem)
    (inverse_a, poison_a), (inverse_k, poison_k) = inverse_norms(a), inverse_norms(k)
    a, k = (x.to(wide(x.dtype)) * inverse[:, None] for x, inverse in ((a, inverse_a), (k, inverse_k)))
    factor = scale(problem, poison_a + poison_k)
    targets = own_columns(problem)
    logits, ignored = problem.tau * (a @ k.T), is_ignored(problem)

    loss, by_logits = direction(logits, targets, ignored)
    if problem.symmetric:
        # Row i is anchor i's positive, and column j is anchor j: logit (i, j) is that of (j, targets[i]).
        ignored = None if ignored is None else ignored[:, targets].T
        back, by_back = direction(logits[:, targets].T, torch.arange(len(a), device=a.device), ignored)
        loss, by_logits = loss + back, by_logits.T.index_add(0, targets, by_back).T
    by_logits = by_logits * (problem.tau * factor)
    by_a = through_normalisation(by_logits @ k, a, inverse_a) if needs[0] else None
    by_k = through_normalisation(by_logits.T @ a, k, inverse_k) if needs[1] or needs[2] else None
    return loss * factor, split(by_a, by_k, problem, needs)


def split(by_anchors: Tensor | None, by_columns: Tensor | None, problem: Problem, needs: tuple[bool, ...]) -> Gradients:
    """Gradients of the columns as those of positives and of negatives."""
    positives = len(problem.positives)
    return (
        by_anchors,
        by_columns[:positives] if by_columns is not None and needs[1] else None,
        by_columns[positives:] if by_columns is not None and needs[2] else None,
    )


def backward(
    problem: Problem, saved: Gradients, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype
) -> Gradients:
    return scaled(saved, upstream, dtype)
