"""pairwise_cosine in plain torch with its gradient written out: nothing of size (B, D) is kept but the rows, and each
column is read once a pass, whatever the number of widths."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .._dtypes import wide
from . import reference

Dims = tuple[int, ...] | None


def forward(a: Tensor, b: Tensor, eps: float, dims: Dims = None) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's; widths are running sums over the segments of columns between them."""
    if dims is None:
        return reference.forward(a, b, eps)
    exact, sizes = wide(a.dtype), segments(dims)
    pieces = zip(a[:, : dims[-1]].split(sizes, 1), b[:, : dims[-1]].split(sizes, 1), strict=True)
    sums = []
    for x, y in pieces:
        x, y = x.to(exact), y.to(exact)
        sums.append(torch.stack([torch.linalg.vecdot(*pair) for pair in ((x, y), (x, x), (y, y))]))
    dot, square_a, square_b = torch.stack(sums, 1).cumsum(1)
    norm_a, norm_b = square_a.sqrt(), square_b.sqrt()
    zero = (norm_a <= eps) | (norm_b <= eps)
    inverse_a, inverse_b = (1 / norm_a).masked_fill(zero, 0), (1 / norm_b).masked_fill(zero, 0)
    return (dot / (norm_a * norm_b)).masked_fill(zero, 0), inverse_a, inverse_b


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
    """dc/da = b / (|a| |b|) - c a / |a|^2, and the same with a and b exchanged; a column is in all widths beyond it."""
    across, along, exact = grad * inverse_a * inverse_b, grad * c, wide(a.dtype)
    if dims is not None:
        across = _from_here_on(across)

    def gradient(row: Tensor, other: Tensor, inverse: Tensor) -> Tensor:
        own = along * inverse * inverse
        if dims is None:
            return (other.to(exact) * across[:, None] - row.to(exact) * own[:, None]).to(row.dtype)
        own, result = _from_here_on(own), torch.zeros_like(row)
        for k, (start, end) in enumerate(pairwise((0, *dims))):
            here = other[:, start:end].to(exact) * across[k, :, None]
            result[:, start:end] = here.addcmul_(row[:, start:end].to(exact), own[k, :, None], value=-1)
        return result

    return (
        gradient(a, b, inverse_a) if needs[0] else None,
        gradient(b, a, inverse_b) if needs[1] else None,
    )


def segments(dims: tuple[int, ...]) -> list[int]:
    """How many columns each width adds to the one before it."""
    return [end - start for start, end in pairwise((0, *dims))]


def _from_here_on(widths: Tensor) -> Tensor:
    """(K, B): the sum over a width and the wider ones."""
    return widths.flip(0).cumsum(0).flip(0)
