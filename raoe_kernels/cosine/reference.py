"""Reference implementation of pairwise_cosine and its gradient, for any dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .problem import Problem

Saved = tuple[Tensor, Tensor, Tensor]


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
    """Return the cosines c = <a, b> / (|a| |b|), and `saved`, which problem.py describes."""
    a, b, eps, dims = problem
    if dims is not None:
        prefixes = (forward(Problem(a[:, :width], b[:, :width], eps, None), needs)[1] for width in dims)
        c, inverse_a, inverse_b = (torch.stack(x) for x in zip(*prefixes, strict=True))
        return c, (c, inverse_a, inverse_b)
    a, b = a.to(wide(a.dtype)), b.to(wide(b.dtype))
    return similarities((a * b).sum(1), (a * a).sum(1), (b * b).sum(1), eps)


def similarities(dot: Tensor, square_a: Tensor, square_b: Tensor, eps: float) -> tuple[Tensor, Saved]:
    """Return the cosines c and `saved`, given the row sums of a b, a a and b b. For equal rows, c is exactly 1, so the
    terms of the gradient cancel. Computing c as <a, b> / (|a| |b|) would leave rounding errors, which losses may
    multiply by 1e4."""
    norm_a, norm_b = square_a.sqrt(), square_b.sqrt()
    zero = (norm_a <= eps) | (norm_b <= eps)
    ratio = torch.maximum(norm_a, norm_b) / torch.minimum(norm_a, norm_b)
    c = (dot / torch.maximum(square_a, square_b) * ratio).masked_fill(zero, 0)
    return c, (c, (1 / norm_a).masked_fill(zero, 0), (1 / norm_b).masked_fill(zero, 0))


def backward(problem: Problem, saved: Saved, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Return the gradients, summed over widths: dc/da = (b / |b| - c a / |a|) / |a|; for dc/db, exchange a and b."""
    a, b, _, dims = problem
    if dims is None:
        by_a, by_b = _one_width(upstream, a, b, *saved)
    else:
        by_a, by_b = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (a, b))
        for width, *rows in zip(dims, upstream, *saved, strict=True):
            width_a, width_b = _one_width(rows[0], a[:, :width], b[:, :width], *rows[1:])
            by_a[:, :width] += width_a
            by_b[:, :width] += width_b
    return by_a.to(dtype) if needs[0] else None, by_b.to(dtype) if needs[1] else None


def _one_width(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor, inverse_a: Tensor, inverse_b: Tensor
) -> tuple[Tensor, Tensor]:
    unit_a, unit_b = a.to(wide(a.dtype)) * inverse_a[:, None], b.to(wide(b.dtype)) * inverse_b[:, None]
    by_a = (unit_b - c[:, None] * unit_a) * (grad * inverse_a)[:, None]
    by_b = (unit_a - c[:, None] * unit_b) * (grad * inverse_b)[:, None]
    return by_a, by_b
