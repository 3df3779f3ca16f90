"""The specification of pairwise_cosine and of its gradient. Any dtype, any device."""

from __future__ import annotations

from torch import Tensor

from .._dtypes import wide


def forward(a: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """c = <a, b> / (|a| |b|), and 1 / |a|, 1 / |b|; all three 0 where |a| or |b| is at most eps."""
    a, b = a.to(wide(a.dtype)), b.to(wide(b.dtype))
    norm_a, norm_b = a.norm(dim=1), b.norm(dim=1)
    zero = (norm_a <= eps) | (norm_b <= eps)
    c = (a * b).sum(1) / (norm_a * norm_b)
    return c.masked_fill(zero, 0), (1 / norm_a).masked_fill(zero, 0), (1 / norm_b).masked_fill(zero, 0)


def backward(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor, inverse_a: Tensor, inverse_b: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dc/da = (unit b - c unit a) / |a|, and the same with a and b exchanged."""
    unit_a, unit_b = a.to(wide(a.dtype)) * inverse_a[:, None], b.to(wide(b.dtype)) * inverse_b[:, None]
    by_a = (unit_b - c[:, None] * unit_a) * (grad * inverse_a)[:, None]
    by_b = (unit_a - c[:, None] * unit_b) * (grad * inverse_b)[:, None]
    return by_a.to(a.dtype) if needs[0] else None, by_b.to(b.dtype) if needs[1] else None
