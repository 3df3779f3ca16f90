"""info_nce_loss in plain torch, a chunk of rows at a time: one bounded buffer of logits, and no matrix of them.

The loss is a mean over the rows, so the gradient of a chunk is complete as soon as its logits are: three matrix
products through BLAS (logits, rows' gradient, columns' gradient), all made in forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .problem import (
    Gradients,
    Problem,
    add_rows,
    losses,
    own_columns,
    scale,
    through_normalisation,
    units_of,
)
from .reference import backward, split

__all__ = ["backward", "forward"]

# Bytes of the buffer: enough rows for a matrix product to run at full speed (512 of 32,768 columns in float32).
BUFFER = 64 << 20
# Up to this tau, exp(+-tau) and sums of it are far from float32's ends: nothing need be subtracted before exp.
UNSHIFTED_TAU = 40.0


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """The loss, and the gradients that are needed, in float64 for float64 rows and in float32 otherwise."""
    a, inverse_a, poison_a = units_of(problem.anchors)
    k, inverse_k, poison_k = units_of(problem.positives, problem.negatives)
    factor = scale(problem, poison_a + poison_k)
    targets, positives = own_columns(problem), len(problem.positives)
    by_a = torch.zeros_like(a) if needs[0] else None
    by_k = torch.zeros_like(k) if needs[1] or needs[2] else None

    wanted = slice(0 if needs[1] else positives, len(k) if needs[2] else positives)
    ignored = None if _all_count(problem) else lambda rows: _ignored(problem, rows)
    loss = _direction(a, k, targets, problem.tau, factor, ignored, by_a, by_k, wanted)
    if problem.symmetric:
        ignored = None if _all_count(problem) else lambda rows: _ignored_back(problem, targets[rows])
        everyone = torch.arange(len(a), device=a.device)
        back = torch.zeros_like(a) if by_k is not None else None
        loss += _direction(k[targets], a, everyone, problem.tau, factor, ignored, back, by_a, slice(None))
        if by_k is not None and back is not None:
            add_rows(by_k, targets, back)
    if by_a is not None:
        through_normalisation(by_a, a, inverse_a)
    if by_k is not None:
        through_normalisation(by_k, k, inverse_k)
    return loss * factor, split(by_a, by_k, problem, needs)


def _direction(
    rows: Tensor,
    columns: Tensor,
    targets: Tensor,
    tau: float,
    factor: Tensor,
    ignored: Callable[[slice], Tensor] | None,
    by_rows: Tensor | None,
    by_columns: Tensor | None,
    wanted: slice,
) -> Tensor:
    """Sum of -log softmax(tau rows columns^T)[target] over the unit rows; factor times its gradients is added to those
    of by_rows and by_columns[wanted] that are there."""
    step = max(1, min(len(rows), BUFFER // (len(columns) * columns.element_size())))
    buffer = columns.new_empty(step, len(columns))
    total = columns.new_zeros(())
    for start in range(0, len(rows), step):
        chunk = slice(start, min(start + step, len(rows)))
        here, own = rows[chunk], targets[chunk, None]
        x = torch.mm(here * tau, columns.T, out=buffer[: len(here)])
        at_own = x.gather(1, own)
        if ignored is not None:
            x.masked_fill_(ignored(chunk), -torch.inf)
            x.scatter_(1, own, at_own)
        shift = torch.zeros_like(at_own)
        if tau > UNSHIFTED_TAU:
            shift = x.amax(1, keepdim=True)
            x.sub_(shift)
        # The positive stays out of the sum: what is left is the loss's own size, and keeps its digits.
        others = x.exp_().scatter_(1, own, 0).sum(1, keepdim=True)
        of_own = (at_own - shift).exp_()
        total += losses(others, of_own, shift, at_own).sum()
        if by_rows is None and by_columns is None:
            continue
        x.scatter_(1, own, -others)
        weight = (tau * factor) / (others + of_own)
        if by_rows is not None:
            by_rows[chunk].addcmul_(x @ columns, weight)
        if by_columns is not None:
            by_columns[wanted].addmm_(x[:, wanted].T, here * weight)
    return total


def _all_count(problem: Problem) -> bool:
    return problem.ignored is None and problem.anchor_ids is None


def _ignored(problem: Problem, rows: slice) -> Tensor:
    """Of some anchors, (n, C): columns that are no negatives of theirs."""
    if problem.anchor_ids is not None and problem.column_ids is not None:
        return problem.anchor_ids[rows, None] == problem.column_ids
    assert problem.ignored is not None
    return problem.ignored[rows]


def _ignored_back(problem: Problem, columns: Tensor) -> Tensor:
    """Of some columns, (n, N): anchors whose negatives they are not."""
    if problem.anchor_ids is not None and problem.column_ids is not None:
        return problem.column_ids[columns, None] == problem.anchor_ids
    assert problem.ignored is not None
    return problem.ignored[:, columns].T
