"""What backward does where a backend has nothing better: the gradient of forward, times what comes from above it."""

from __future__ import annotations

import torch
from torch import Tensor


def backward(grads: Tensor, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Sum over the parts of (gradient of the part) x (gradient from above it), in the dtype of similarity.

    grads (B,) with one upstream scalar, or (2, B) with two.
    """
    if len(upstream) == 1:
        grad = grads * upstream[0]
    else:
        grad = torch.addcmul(grads[0] * upstream[0], grads[1], upstream[1])
    return grad if grad.dtype == dtype else grad.to(dtype)
