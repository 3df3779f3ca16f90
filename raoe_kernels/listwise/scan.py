"""Listwise ops in plain torch, all lists at once: one sort and two running sums per row, O(R n) memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._dtypes import wide
from .._problems import Gradients, Needs, backward
from .._running import logcumsumexp
from .problem import Problem, mean_of_lists

__all__ = ["backward", "forward", "refine"]

INF = float("inf")
LINEAR = 85.0
"""Scores at most LINEAR - ln n below a row's largest: their exp and sums of 1 / exp stay in float32's range."""


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """ListMLE loss and gradient. With s sorted by teacher and S_k = logsumexp_{m >= k} s_m, L = sum_k (S_k - s_k), and

    dL/ds_m = sum_{k <= m} exp(s_m - S_k) - 1 = exp(s_m + Q_m) - 1,    Q_m = logsumexp_{k <= m} of -S_k

    On a CPU, plain sums of exponentials are used if they fit float32's range, which saves a logarithm per term.
    """
    student, teacher, mask, order, scale = problem
    if mask is not None:
        teacher = teacher.masked_fill(~mask, 0)  # masked values must not influence anything, not even rounding
    items = _descending(teacher, order)
    raw = student.to(wide(student.dtype)).gather(1, items)
    inside = None if mask is None else mask.gather(1, items)
    # Subtracting the row's largest score keeps the digits of the differences. Masked items keep their places with
    # weight exp(-inf).
    known = raw if inside is None else raw.masked_fill(~inside, -INF)
    largest = known.amax(1, keepdim=True)
    s = scale * (known - largest.masked_fill(largest == -INF, 0))
    linear = False
    if s.device.type == "cpu":
        there = s if inside is None else s.masked_fill(~inside, 0)
        linear = bool(there.amin() > math.log(s.shape[1]) - LINEAR)
    if linear:
        weight = s.exp()
        left = weight.flip(1).cumsum(1).flip(1)
        terms = left.log() - s
    else:
        remaining = logcumsumexp(s.flip(1)).flip(1)
        terms = remaining - s
    loss = (terms if inside is None else terms.masked_fill(~inside, 0)).sum()
    if not needs[0]:
        return mean_of_lists(problem, loss, None)
    if linear:
        chosen = left.reciprocal() if inside is None else left.reciprocal().masked_fill(~inside, 0)
        grad = weight * chosen.cumsum(1) - 1
    else:
        chosen = -remaining if inside is None else (-remaining).masked_fill(~inside, -INF)
        grad = (s + chosen.logcumsumexp(1)).exp() - 1
    return mean_of_lists(problem, loss, torch.empty_like(grad).scatter_(1, items, scale * grad))


def _descending(teacher: Tensor, order: Tensor | None) -> Tensor:
    """Indices that sort each row in descending order; equal values by `order`, then by their position."""
    if order is None:
        return teacher.sort(dim=1, descending=True, stable=True).indices
    first = order.argsort(dim=1, stable=True)
    return first.gather(1, teacher.gather(1, first).sort(dim=1, descending=True, stable=True).indices)


def refine(phi: Tensor, mask: Tensor | None, omega: float) -> Tensor:
    """Refine all rows at once. Row j's list is its columns k >= j. All other columns sort to the front as +inf, so the
    value with true rank k - j lands in column k, and the sorted row aligns with phi."""
    n = phi.shape[-1]
    phi = phi.to(wide(phi.dtype))
    place = torch.arange(n, device=phi.device)
    listed = (place >= place[:, None]).expand_as(phi)
    if mask is not None:
        listed = listed & mask[:, None, :] & mask[:, :, None]
    broken = (phi.isnan() & listed).any(-1, keepdim=True)
    ranked = phi.masked_fill(~listed, INF).sort(dim=-1, descending=True).values
    if mask is not None:  # masked sentences sort to the front: shift each sentence's column accordingly
        real = mask.long()
        column = (n - real.sum(-1, keepdim=True) + real.cumsum(-1) - 1).clamp(min=0)
        ranked = ranked.gather(-1, column[:, None, :].expand_as(phi))
    d = ranked - phi
    refined = (phi + d.sign() * torch.log1p(omega * d.abs())).masked_fill(broken, torch.nan).masked_fill(~listed, 0)
    return refined + refined.triu(1).transpose(-1, -2)
