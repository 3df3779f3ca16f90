"""What backends share: backward, where one has nothing better, and several rows of similarity as so many calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor | None]]


def by_row(forward: Forward) -> Forward:
    """A backend's forward of similarity (B,), as one of (K, B), too."""

    @wraps(forward)
    def of_rows(similarity: Tensor, *others, **options) -> tuple[Tensor, Tensor | None]:
        if similarity.ndim == 1:
            return forward(similarity, *others, **options)
        losses, grads = zip(*(forward(row, *others, **options) for row in similarity), strict=True)
        return torch.stack(losses, -1), None if grads[0] is None else torch.stack(grads, -2)

    return of_rows


def backward(grads: Tensor, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Sum over the parts of (gradient of the part) x (gradient from above it), in the dtype of similarity.

    grads (B,) with one upstream scalar, or (2, B) with two; or (K, B) and (2, K, B), with upstream of (K,).
    """
    if upstream[0].ndim:
        upstream = tuple(each[:, None] for each in upstream)
    if len(upstream) == 1:
        grad = grads * upstream[0]
    else:
        grad = torch.addcmul(grads[0] * upstream[0], grads[1], upstream[1])
    return grad if grad.dtype == dtype else grad.to(dtype)
