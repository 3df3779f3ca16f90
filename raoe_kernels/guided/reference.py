"""Reference implementation of the guided ops and of their gradient, for any dtype and device."""

from __future__ import annotations

from torch import Tensor

from .._dtypes import wide

INF = float("inf")


def _log_softmax(logits: Tensor) -> Tensor:
    """log_softmax that gives -inf for a logit of -inf, even in a row where all logits are -inf."""
    return logits.to(wide(logits.dtype)).log_softmax(-1).masked_fill(logits == -INF, -INF)


def forward(current: Tensor, previous: Tensor, guidance: float) -> tuple[Tensor, None, None]:
    """Eq. 4, guidance p - (guidance - 1) q with log-probabilities p and q, computed as p + (guidance - 1) (p - q)."""
    p, q = _log_softmax(current), _log_softmax(previous)
    result = p + (guidance - 1) * (p - q)
    return result.masked_fill(current == -INF, -INF), None, None


def backward(
    grad: Tensor,
    current: Tensor,
    previous: Tensor,
    of_current: Tensor | None,
    of_previous: Tensor | None,
    guidance: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient by d log_softmax(z)_v / dz_w = [v = w] - softmax(z)_w, over the columns v with a finite result."""
    grad = grad.masked_fill((current == -INF) | (previous == -INF), 0)
    total = grad.sum(-1, keepdim=True)

    def gradient(logits: Tensor, weight: float) -> Tensor:
        return (weight * (grad - _log_softmax(logits).exp() * total)).to(logits.dtype)

    return gradient(current, guidance) if needs[0] else None, gradient(previous, 1 - guidance) if needs[1] else None


def argmax(current: Tensor, previous: Tensor, guidance: float) -> Tensor:
    """argmax of guidance current - (guidance - 1) previous: Eq. 4 without the terms that are constant in a row."""
    x, y = current.to(wide(current.dtype)), previous.to(wide(previous.dtype))
    return (x + (guidance - 1) * (x - y)).masked_fill(current == -INF, -INF).argmax(-1)
