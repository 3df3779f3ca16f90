"""Listwise ops in plain torch, all lists at once, with one sort and two running sums per row, and O(R n) memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .._running import logcumsumexp
from .problem import Problem, Refinement, mean_of_lists

LINEAR = 85.0
"""If no score is more than LINEAR - ln n below its row's maximum, exp and sums of 1 / exp stay in float32's range."""


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the ListMLE loss L and its gradient, given scores s in the teacher's order.

        L = sum_k (S_k - s_k)                           S_k = logsumexp_{m >= k} s_m
        dL/ds_m = sum_{k <= m} exp(s_m - S_k) - 1 = exp(s_m + Q_m) - 1      Q_m = logsumexp_{k <= m} -S_k

    On a CPU, plain sums of exponentials are used if they stay within float32's range. This saves a logarithm per term.
    """
    student, teacher, mask, order, scale = problem
    if mask is not None:
        teacher = teacher.masked_fill(~mask, 0)  # masked values must have no influence, not even on rounding
    items = _descending(teacher, order)
    raw = student.to(wide(student.dtype)).gather(1, items)
    item_mask = None if mask is None else mask.gather(1, items)
    # Subtracting the row's largest score preserves the precision of the differences. Masked items keep their positions,
    # with weight exp(-inf) = 0.
    masked_raw = raw if item_mask is None else raw.masked_fill(~item_mask, -torch.inf)
    largest = masked_raw.amax(1, keepdim=True)
    s = scale * (masked_raw - largest.masked_fill(largest == -torch.inf, 0))
    linear = False
    if s.device.type == "cpu":
        item_scores = s if item_mask is None else s.masked_fill(~item_mask, 0)
        linear = bool(item_scores.amin() > math.log(s.shape[1]) - LINEAR)
    if linear:
        weight = s.exp()
        tail_sums = weight.flip(1).cumsum(1).flip(1)
        terms = tail_sums.log() - s
    else:
        remaining = logcumsumexp(s.flip(1)).flip(1)
        terms = remaining - s
    loss = (terms if item_mask is None else terms.masked_fill(~item_mask, 0)).sum()
    if not needs[0]:
        return mean_of_lists(problem, loss, None)
    if linear:
        inverse = tail_sums.reciprocal() if item_mask is None else tail_sums.reciprocal().masked_fill(~item_mask, 0)
        grad = weight * inverse.cumsum(1) - 1
    else:
        inverse = -remaining if item_mask is None else (-remaining).masked_fill(~item_mask, -torch.inf)
        grad = (s + inverse.logcumsumexp(1)).exp() - 1
    return mean_of_lists(problem, loss, torch.empty_like(grad).scatter_(1, items, scale * grad))


def _descending(teacher: Tensor, order: Tensor | None) -> Tensor:
    """Return the indices that sort each row of `teacher` in descending order. Items with equal scores are sorted by
    `order`, then by position."""
    if order is None:
        return teacher.sort(dim=1, descending=True, stable=True).indices
    first = order.argsort(dim=1, stable=True)
    return first.gather(1, teacher.gather(1, first).sort(dim=1, descending=True, stable=True).indices)


def refine(problem: Refinement, needs: Needs) -> tuple[Tensor, Gradients]:
    """Refine all rows at once. In row j of phi, the columns k >= j form list j. The first j columns are set to +inf,
    which sorting moves to the front. So after sorting, column k holds the value at item k's true rank, k - j."""
    phi, mask, omega = problem
    n = phi.shape[-1]
    phi = phi.to(wide(phi.dtype))
    place = torch.arange(n, device=phi.device)
    in_list = (place >= place[:, None]).expand_as(phi)
    if mask is not None:
        in_list = in_list & mask[:, None, :] & mask[:, :, None]
    has_nan = (phi.isnan() & in_list).any(-1, keepdim=True)
    sorted_phi = phi.masked_fill(~in_list, torch.inf).sort(dim=-1, descending=True).values
    if mask is not None:  # sorting moves masked sentences to the front and so shifts all other columns
        count_mask = mask.long()
        column = (n - count_mask.sum(-1, keepdim=True) + count_mask.cumsum(-1) - 1).clamp(min=0)
        sorted_phi = sorted_phi.gather(-1, column[:, None, :].expand_as(phi))
    d = sorted_phi - phi
    refined = (phi + d.sign() * torch.log1p(omega * d.abs())).masked_fill(has_nan, torch.nan).masked_fill(~in_list, 0)
    return refined + refined.triu(1).transpose(-1, -2), ()
