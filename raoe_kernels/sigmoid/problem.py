"""Input to the backends of sigmoid_loss (see _contract.py), the op's registration, and functions for columns that all
backends share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._contract import register
from .._dispatch import Op, backends, triton_missing
from ..infonce.problem import has_several_ids


class Problem(NamedTuple):
    """Arguments of one call. The logits have C = P + M columns: the P positives, followed by the M negatives.

    Attributes:
        anchors (N, D), positives (P, D), negatives (M, D) or None: rows of any norm, of the same dtype
        scale, bias: scalar tensors, float64 for float64 rows, otherwise float32
        targets: (N,) int64, column of each anchor's positive, or -1 if it has none; None means column i for anchor i
        ignored: (N, C) bool or None, True for columns to leave out of an anchor's negatives
        anchor_ids (N,), column_ids (C,): int32 or int64, or None; columns with an anchor's id are not its negatives
        anchor_groups (N,), column_groups (C,): int32 or int64, or None; columns with an anchor's group number are its
            positives. The group numbers are the call's `positive_ids`.
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
        return self.positives.shape[0] + (0 if self.negatives is None else self.negatives.shape[0])


def _is_empty(problem: Problem) -> bool:
    return len(problem.anchors) == 0 or problem.column_count == 0


OP = Op(
    "sigmoid",
    ("sigmoid_loss",),
    backends(__package__, triton=triton_missing),
    by_case=lambda problem: "scan" if has_several_ids(problem) else "triton",
)
sigmoid = register(OP, Problem, gradients=5, is_empty=_is_empty)


def own_columns(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Return two (N,) tensors: each anchor's target (int64, clamped to valid columns), and whether it has a target
    (bool). The second result is None if `targets` is None, because all anchors then have a target."""
    if problem.targets is None:
        return torch.arange(len(problem.anchors), device=problem.anchors.device), None
    return problem.targets.clamp(0, problem.column_count - 1), problem.targets >= 0


def mean_factor(problem: Problem, poison: Tensor) -> Tensor:
    """Return the factor by which the sum of the rows' losses is multiplied: 1 / N, or NaN if a row or a target is
    invalid. An error would be clearer, but raising it would make the host wait for the GPU."""
    factor = poison + 1 / len(problem.anchors)
    if problem.targets is None:
        return factor
    outside = ((problem.targets < -1) | (problem.targets >= problem.column_count)).any()
    return factor.masked_fill(outside, torch.nan)


def is_grouped(problem: Problem, rows: slice) -> Tensor | None:
    """Return a bool mask (n, C) for a slice of the anchors, True for the columns in each anchor's group, or None if
    there are no groups."""
    if problem.anchor_groups is None or problem.column_groups is None:
        return None
    return problem.anchor_groups[rows, None] == problem.column_groups
