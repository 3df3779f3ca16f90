"""The specification: RAOE's losses as the papers write them, over all B x B pairs. Any dtype, any device; slow.

Source: Rank-Awareness and Angular Constraints, Eq. 2 (rank margin) and Eq. 3 (gated angular). Throughout,
row i and column j of a matrix are the pair (i, j), and `active[i, j]` says whether it is in the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raoe_kernels.pairwise.params import PairwiseParams

CLIP = 1e-6


def doubled_ranks(scores: Tensor, ties: str) -> Tensor:
    """Twice the rank of each score (int64), ties as in scipy.stats.rankdata, counted from 0."""
    index = torch.arange(len(scores), device=scores.device)
    equal = scores[:, None] == scores
    below = (scores[:, None] > scores).sum(1)  # how many scores are strictly smaller
    if ties == "min":
        return 2 * below
    if ties == "max":
        return 2 * (below + equal.sum(1) - 1)
    if ties == "average":
        return 2 * below + equal.sum(1) - 1
    earlier = index < index[:, None]
    if ties == "ordinal":
        return 2 * (below + (equal & earlier).sum(1))
    first_of_its_value = ~(equal & earlier).any(1)
    return 2 * ((scores[:, None] > scores) & first_of_its_value).sum(1)  # dense


def rank_pairs(scores: Tensor, threshold: int, ties: str) -> Tensor:
    """r_j - r_i > margin (Eq. 2)."""
    ranks = doubled_ranks(scores, ties)
    return ranks - ranks[:, None] >= threshold


def gated_pairs(scores: Tensor, labels: Tensor | None) -> Tensor:
    """l_i > l_j and s_i < s_j (Eq. 3); without labels s_i < s_j alone (the paper's Table 8, gating on S only).

    Gating on L only is the same with scores = ~labels, which reverses the integers' order: see api.py.
    """
    lower = scores[:, None] < scores
    return lower if labels is None else lower & (labels[:, None] > labels)


def angle(similarity: Tensor) -> Tensor:
    """arccos of the clipped similarity; torch's clamp gives gradient 0 outside, and we give 0 on the bounds too."""
    clipped = similarity.clamp(-1 + CLIP, 1 - CLIP)
    inside = (similarity > -1 + CLIP) & (similarity < 1 - CLIP)
    return torch.where(inside, clipped, clipped.detach()).acos()


def log_one_plus_sum_exp(exponents: Tensor, active: Tensor) -> Tensor:
    """log(1 + sum over active pairs of exp(exponents)); exactly 0 with no active pair."""
    masked = exponents.masked_fill(~active, -torch.inf).flatten()
    return torch.cat([masked.new_zeros(1), masked]).logsumexp(0)


def rank_margin(similarity: Tensor, scores: Tensor, params: PairwiseParams) -> Tensor:
    """Eq. 2: log(1 + sum of exp(tau (c_i - c_j)))."""
    exponents = params.tau * (similarity[:, None] - similarity)
    loss = log_one_plus_sum_exp(exponents, rank_pairs(scores, params.threshold, params.ties))
    return loss + nan_if_any(similarity, scores)


def gated_angular(similarity: Tensor, scores: Tensor, labels: Tensor | None, params: PairwiseParams) -> Tensor:
    """Eq. 3: log(1 + sum of exp(tau (theta_j - theta_i)))."""
    theta = angle(similarity)
    exponents = params.tau * (theta - theta[:, None])
    return log_one_plus_sum_exp(exponents, gated_pairs(scores, labels)) + nan_if_any(similarity, scores)


def nan_if_any(similarity: Tensor, scores: Tensor) -> Tensor:
    """0, or NaN if similarity or scores hold one: an input that cannot be ranked has no loss, also with no pair."""
    bad = similarity.isnan().any() | scores.isnan().any()
    # 0 * similarity carries the NaN into every element of the gradient.
    return torch.where(bad, torch.nan, 0.0).to(similarity.dtype) * similarity.sum().mul(0).add(1)


def forward(
    similarity: Tensor,
    scores: Tensor,
    labels: Tensor | None,
    params: PairwiseParams,
    need_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Losses (rows,) and their gradients (rows, B) by autograd over the formulas above."""
    compute = torch.float64 if similarity.dtype == torch.float64 else torch.float32
    with torch.enable_grad():
        c = similarity.detach().to(compute).requires_grad_(need_grad)
        zero = c.sum() * 0
        rank = params.rank_weight * rank_margin(c, scores, params) if params.rank else zero
        gated = params.angle_weight * gated_angular(c, scores, labels, params) if params.angle else zero
        losses = [rank, gated] if params.parts else [rank + gated]
        grads = None
        if need_grad:
            grads = torch.stack([torch.autograd.grad(loss, c, retain_graph=True)[0] for loss in losses])
    return torch.stack(losses).detach(), grads
