"""Reference implementation of RAOE's losses as the papers define them, over all B x B pairs, for any dtype and device.

Source: Rank-Awareness and Angular Constraints, Eq. 2 (rank margin) and Eq. 3 (gated angular). Element [i, j] of a
matrix belongs to the pair (i, j), and `active[i, j]` is True if the pair is in the sum. The gradient is written by hand
because autograd cannot run inside a registered operator. A test checks the gradient with gradcheck.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .problem import Problem, by_row

CLIP = 1e-6


def doubled_ranks(scores: Tensor, ties: str) -> Tensor:
    """Return the doubled rank of each score: 2 x rank as int64, because an average rank can end in .5. Ranks start at
    0, with the tie rules of scipy.stats.rankdata."""
    index = torch.arange(len(scores), device=scores.device)
    equal = scores[:, None] == scores
    below = (scores[:, None] > scores).sum(1)  # number of smaller scores
    if ties == "min":
        return 2 * below
    if ties == "max":
        return 2 * (below + equal.sum(1) - 1)
    if ties == "average":
        return 2 * below + equal.sum(1) - 1
    is_earlier = index < index[:, None]
    if ties == "ordinal":
        return 2 * (below + (equal & is_earlier).sum(1))
    run_start = ~(equal & is_earlier).any(1)
    return 2 * ((scores[:, None] > scores) & run_start).sum(1)  # dense


def rank_pairs(scores: Tensor, threshold: int, ties: str) -> Tensor:
    """Return a bool matrix (B, B), in which element [i, j] is True if r_j - r_i > margin (Eq. 2)."""
    ranks = doubled_ranks(scores, ties)
    return ranks - ranks[:, None] >= threshold


def gated_pairs(scores: Tensor, labels: Tensor | None) -> Tensor:
    """Return a bool matrix (B, B), in which element [i, j] is True if l_i > l_j and s_i < s_j (Eq. 3). Without labels,
    the condition is s_i < s_j ("S only" in Table 8). For gate="label", api.py passes ~labels as scores, and
    labels=None. The operator ~ reverses the order of integers."""
    lower = scores[:, None] < scores
    return lower if labels is None else lower & (labels[:, None] > labels)


def log_one_plus_sum_exp(exponents: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Return L = log(1 + sum over active pairs of exp(exponents)) and dL/d(exponents). If no pair is active, L is 0."""
    if not active.any():
        return exponents.new_zeros(()), torch.zeros_like(exponents)
    log_z = exponents.masked_fill(~active, -torch.inf).flatten().logsumexp(0)
    # For a small Z, log(1 + Z) would lose the digits of Z, which logaddexp keeps.
    loss = torch.logaddexp(log_z, torch.zeros_like(log_z))
    return loss, (exponents - loss).exp().masked_fill(~active, 0)


def rank_margin(c: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return Eq. 2, log(1 + sum of exp(scale (c_i - c_j))), and its gradient with respect to c."""
    exponents = problem.scale * (c[:, None] - c)
    loss, weights = log_one_plus_sum_exp(exponents, rank_pairs(problem.scores, problem.threshold, problem.ties))
    return loss, problem.scale * (weights.sum(1) - weights.sum(0))


def gated_angular(c: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return Eq. 3, log(1 + sum of exp(scale (theta_j - theta_i))), and its gradient with respect to c."""
    theta = c.clamp(-1 + CLIP, 1 - CLIP).acos()
    exponents = problem.scale * (theta - theta[:, None])
    loss, weights = log_one_plus_sum_exp(exponents, gated_pairs(problem.scores, problem.labels))
    by_theta = problem.scale * (weights.sum(0) - weights.sum(1))
    clip_mask = (c <= -1 + CLIP) | (c >= 1 - CLIP)
    return loss, (-by_theta / ((1 - c) * (1 + c)).sqrt()).masked_fill(clip_mask, 0)


@by_row
def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the losses and their gradients with respect to similarity, both (2, B) with problem.parts, else (B,)."""
    c = problem.similarity.to(wide(problem.similarity.dtype))
    parts = []
    if problem.rank:
        parts.append((problem.rank_weight, *rank_margin(c, problem)))
    if problem.angle:
        parts.append((problem.angle_weight, *gated_angular(c, problem)))
    # NaN cannot be ranked, so the loss is NaN even if no pair is active.
    nan = c.isnan().any() | problem.scores.isnan().any()
    losses = torch.stack([weight * loss for weight, loss, _ in parts]).masked_fill(nan, torch.nan)
    grads = torch.stack([weight * grad for weight, _, grad in parts]).masked_fill(nan, torch.nan)
    if not problem.parts:
        losses, grads = losses.sum(0), grads.sum(0)
    return losses, (grads if needs[0] else None,)
