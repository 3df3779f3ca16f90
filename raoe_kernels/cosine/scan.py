"""pairwise_cosine in plain torch with its gradient written out: nothing of size (B, D) is kept but the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from raoe_kernels.cosine.reference import forward

__all__ = ["backward", "forward"]


def backward(
    grad: Tensor, a: Tensor, b: Tensor, c: Tensor, inverse_a: Tensor, inverse_b: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dc/da = b / (|a| |b|) - c a / |a|^2, and the same with a and b exchanged."""
    across = (grad * inverse_a * inverse_b)[:, None]
    along = grad * c

    def gradient(row: Tensor, other: Tensor, inverse: Tensor) -> Tensor:
        own = (along * inverse * inverse)[:, None]
        wide = torch.float64 if row.dtype == torch.float64 else torch.float32
        return (other.to(wide) * across - row.to(wide) * own).to(row.dtype)

    return (
        gradient(a, b, inverse_a) if needs[0] else None,
        gradient(b, a, inverse_b) if needs[1] else None,
    )
