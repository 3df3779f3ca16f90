"""Reference implementation of pairwise_cosine and of its gradient, for any dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import wide

Dims = tuple[int, ...] | None


def forward(a: Tensor, b: Tensor, eps: float, dims: Dims = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return c = <a, b> / (|a| |b|), 1 / |a| and 1 / |b|, all three 0 where |a| or |b| is at most eps."""
    if dims is not None:
        c, inverse_a, inverse_b = zip(*(forward(a[:, :width], b[:, :width], eps) for width in dims), strict=True)
        return torch.stack(c), torch.stack(inverse_a), torch.stack(inverse_b)
    a, b = a.to(wide(a.dtype)), b.to(wide(b.dtype))
    norm_a, norm_b = a.norm(dim=1), b.norm(dim=1)
    zero = (norm_a <= eps) | (norm_b <= eps)
    c = (a * b).sum(1) / (norm_a * norm_b)
    return c.masked_fill(zero, 0), (1 / norm_a).masked_fill(zero, 0), (1 / norm_b).masked_fill(zero, 0)


def backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    needs: tuple[bool, bool],
    dims: Dims = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by dc/da = (unit b - c unit a) / |a|, likewise for b, summed over the widths."""
    if dims is None:
        by_a, by_b = _one_width(grad, a, b, c, inverse_a, inverse_b)
    else:
        by_a, by_b = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (a, b))
        for width, *saved in zip(dims, grad, c, inverse_a, inverse_b, strict=True):
            width_a, width_b = _one_width(saved[0], a[:, :width], b[:, :width], *saved[1:])
            by_a[:, :width] += width_a
            by_b[:, :width] += width_b
    return by_a.to(a.dtype) if needs[0] else None, by_b.to(b.dtype) if needs[1] else None


def _one_width(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor, inverse_a: Tensor, inverse_b: Tensor
) -> tuple[Tensor, Tensor]:
    unit_a, unit_b = a.to(wide(a.dtype)) * inverse_a[:, None], b.to(wide(b.dtype)) * inverse_b[:, None]
    by_a = (unit_b - c[:, None] * unit_a) * (grad * inverse_a)[:, None]
    by_b = (unit_a - c[:, None] * unit_b) * (grad * inverse_b)[:, None]
    return by_a, by_b
