"""What every backend of sigmoid_loss is given (what a backend is says _problems.py), and the rules about columns that
they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import Backend, Op, triton_missing
from .._problems import differentiable


class Problem(NamedTuple):
    """One call. C = P + M columns: the positives, then the negatives.

    anchors     (N, D), positives (P, D), negatives (M, D) or None: rows as given, any norm, one dtype
    scale, bias   (), in the dtype of the arithmetic
    targets     (N,) int64: the column that is each anchor's positive, -1 where none is; None: anchor i's is column i
    ignored     (N, C) bool or None: columns that are no negatives of an anchor
    anchor_ids  (N,) int64 and column_ids (C,) int64, or None: the same, where two ids are equal
    anchor_groups (N,) int64 and column_groups (C,) int64, or None: columns of the anchor's group are positives as well
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor | None
    scale: Tensor
    bias: Tensor
    targets: Tensor | None
    ignored: Tensor | None
    anchor_ids: Tensor | None
    column_ids: Tensor | None
    anchor_groups: Tensor | None
    column_groups: Tensor | None

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.anchors, self.positives, self.negatives

    @property
    def column_count(self) -> int:
        return len(self.positives) + (0 if self.negatives is None else len(self.negatives))


OP = Op(
    "sigmoid",
    ("sigmoid_loss",),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
)

sigmoid = differentiable(
    OP,
    Problem,
    "Tensor anchors, Tensor positives, Tensor? negatives, Tensor scale, Tensor bias, Tensor? targets, Tensor? ignored, "
    "Tensor? anchor_ids, Tensor? column_ids, Tensor? anchor_groups, Tensor? column_groups",
    5,
    lambda problem: len(problem.anchors) == 0 or problem.column_count == 0,
)


def own_columns(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """(N,) int64, the column of each anchor's positive, one there is whatever was asked for; and (N,) bool, whether it
    is one, None where all are."""
    if problem.targets is None:
        return torch.arange(len(problem.anchors), device=problem.anchors.device), None
    return problem.targets.clamp(0, problem.column_count - 1), problem.targets >= 0


def mean_factor(problem: Problem, poison: Tensor) -> Tensor:
    """() what multiplies the sum of the rows' losses: 1 / N; NaN where a row or a target is no good. On a GPU a target
    cannot be looked at without waiting for it, and NaN is better than a wrong number."""
    factor = poison + 1 / len(problem.anchors)
    if problem.targets is None:
        return factor
    outside = ((problem.targets < -1) | (problem.targets >= problem.column_count)).any()
    return factor.masked_fill(outside, torch.nan)


def is_grouped(problem: Problem, rows: slice) -> Tensor | None:
    """(n, C), of some anchors: columns of the same group; None where there are no groups."""
    if problem.anchor_groups is None or problem.column_groups is None:
        return None
    return problem.anchor_groups[rows, None] == problem.column_groups
