"""The specification of pairwise_cosine, and its gradient by autograd. Any dtype, any device."""

from __future__ import annotations

import torch
from torch import Tensor


def similarity(a: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """c = <a, b> / (|a| |b|), and 1 / |a|, 1 / |b|; all three 0 where |a| or |b| is at most eps."""
    dot, norm_a, norm_b = (a * b).sum(1), a.norm(dim=1), b.norm(dim=1)
    dead = (norm_a <= eps) | (norm_b <= eps)
    inverse_a, inverse_b = ((1 / norm).masked_fill(dead, 0) for norm in (norm_a, norm_b))
    return (dot * inverse_a * inverse_b).masked_fill(dead, 0), inverse_a, inverse_b


def _wide(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.float64 else rows.float()


def forward(a: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return similarity(_wide(a), _wide(b), eps)


def backward(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor, inverse_a: Tensor, inverse_b: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    with torch.enable_grad():
        rows = [_wide(x.detach()).requires_grad_() for x in (a, b)]
        # Dead rows (inverse 0) are cut out before the norm, whose own gradient at 0 is not finite.
        alive = (inverse_a != 0)[:, None]
        shown = [torch.where(alive, x, x.detach() * 0 + 1) for x in rows]
        value = similarity(*shown, 0.0)[0]
        grads = torch.autograd.grad(value, rows, grad)
    return tuple(g.to(a.dtype) if need else None for g, need in zip(grads, needs, strict=True))
