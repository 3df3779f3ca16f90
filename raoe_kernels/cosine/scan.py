"""pairwise_cosine in plain torch with its gradient written out: nothing of size (B, D) is kept but the rows."""

from __future__ import annotations

from torch import Tensor

from .._dtypes import wide
from .reference import forward

__all__ = ["backward", "forward"]


def backward(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor, inverse_a: Tensor, inverse_b: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dc/da = b / (|a| |b|) - c a / |a|^2, and the same with a and b exchanged."""
    across = (grad * inverse_a * inverse_b)[:, None]
    along = grad * c
    exact = wide(a.dtype)

    def gradient(row: Tensor, other: Tensor, inverse: Tensor) -> Tensor:
        own = (along * inverse * inverse)[:, None]
        return (other.to(exact) * across - row.to(exact) * own).to(row.dtype)

    return (
        gradient(a, b, inverse_a) if needs[0] else None,
        gradient(b, a, inverse_b) if needs[1] else None,
    )
