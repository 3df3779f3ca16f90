"""What every backend of list_mle_loss is given, and the rules about lists that they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._problems import Gradients


class Problem(NamedTuple):
    """One call: R lists of n items.

    student, teacher  (R, n); mask (R, n) bool, True where there is an item, or None
    order             (R, n) or None: of teacher's equals the one with the smaller order comes first
    """

    student: Tensor
    teacher: Tensor
    mask: Tensor | None
    order: Tensor | None
    scale: float


def mean_of_lists(problem: Problem, loss: Tensor, grad: Tensor | None) -> tuple[Tensor, Gradients]:
    """From the sum over the lists and its gradient, (R, n), the mean and its; both NaN, but for what is masked, where a
    value is NaN."""
    teacher, mask = problem.teacher, problem.mask
    loss = loss / len(teacher)
    if teacher.is_floating_point():
        broken = teacher.isnan()
        broken = (broken if mask is None else broken & mask).any()
        loss = loss.masked_fill(broken, torch.nan)
    if grad is not None:
        grad = (grad / len(teacher)).masked_fill(loss.isnan(), torch.nan)
        grad = grad if mask is None else grad.masked_fill(~mask, 0)
    return loss, (grad,)
