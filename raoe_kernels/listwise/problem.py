"""Inputs to the backends of the listwise ops (see _contract.py), the ops' registration, and the mean over lists."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._contract import Gradients, like_field, register
from .._dispatch import Op, backends


class Problem(NamedTuple):
    """Arguments of one call with R lists of n items.

    Attributes:
        student, teacher: (R, n); mask: None, or (R, n) bool, True where there is an item
        order: (R, n) or None, keys by which items with equal teacher scores are sorted (ascending)
    """

    student: Tensor
    teacher: Tensor
    mask: Tensor | None
    order: Tensor | None
    scale: float


class Refinement(NamedTuple):
    """Arguments of refine_similarity: `phi` is (C, n, n), and `mask` is (C, n) bool or None."""

    phi: Tensor
    mask: Tensor | None
    omega: float


OP = Op("listwise", ("list_mle_loss", "refine_similarity"), backends(__package__))
list_mle = register(OP, Problem, gradients=1)
refine = register(OP, Refinement, gradients=0, result=like_field, name="refine_similarity", forward="refine")


def mean_of_lists(problem: Problem, loss: Tensor, grad: Tensor | None) -> tuple[Tensor, Gradients]:
    """Convert the sum of the lists' losses and its gradient (R, n) to the mean loss and its gradient. If any item's
    score is NaN, the loss and the gradients of all items are NaN."""
    teacher, mask = problem.teacher, problem.mask
    loss = loss / len(teacher)
    if teacher.is_floating_point():
        has_nan = teacher.isnan()
        has_nan = (has_nan if mask is None else has_nan & mask).any()
        loss = loss.masked_fill(has_nan, torch.nan)
    if grad is not None:
        grad = (grad / len(teacher)).masked_fill(loss.isnan(), torch.nan)
        grad = grad if mask is None else grad.masked_fill(~mask, 0)
    return loss, (grad,)
