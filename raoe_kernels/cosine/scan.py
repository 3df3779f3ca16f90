"""pairwise_cosine in plain torch with a hand-written gradient, which saves no (B, D) tensor except a and b. The forward
pass and the backward pass each read every column once, for any number of widths."""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .._widths import from_here_on, segments
from . import reference
from .problem import Problem
from .reference import Saved


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
    """Return what reference.forward returns. With several widths, each width adds one segment to running sums."""
    a, b, eps, dims = problem
    if dims is None:
        return reference.forward(problem, needs)
    exact, sums = wide(a.dtype), []
    for segment in segments(dims):
        x, y = a[:, segment].to(exact), b[:, segment].to(exact)
        sums.append(torch.stack([torch.linalg.vecdot(*pair) for pair in ((x, y), (x, x), (y, y))]))
    dot, square_a, square_b = torch.stack(sums, 1).cumsum(1)
    return reference.similarities(dot, square_a, square_b, eps)


def backward(problem: Problem, saved: Saved, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Return the gradients: dc/da = b / (|a| |b|) - c a / |a|^2; for dc/db, exchange a and b. The gradient of a column
    is the sum over all widths that include the column."""
    a, b, _, dims = problem
    c, inverse_a, inverse_b = saved
    across, along, exact = upstream * inverse_a * inverse_b, upstream * c, wide(a.dtype)
    if dims is not None:
        across = from_here_on(across)

    def gradient(row: Tensor, other: Tensor, inverse: Tensor) -> Tensor:
        own = along * inverse * inverse
        if dims is None:
            return (other.to(exact) * across[:, None] - row.to(exact) * own[:, None]).to(dtype)
        own, result = from_here_on(own), torch.zeros_like(row)
        for k, segment in enumerate(segments(dims)):
            segment_grad = other[:, segment].to(exact) * across[k, :, None]
            result[:, segment] = segment_grad.addcmul_(row[:, segment].to(exact), own[k, :, None], value=-1)
        return result

    return gradient(a, b, inverse_a) if needs[0] else None, gradient(b, a, inverse_b) if needs[1] else None
