"""The specification of the guided ops and of their gradient. Any dtype, any device."""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _log_softmax(logits: Tensor) -> Tensor:
    """torch's, but -inf where the logit is, also in a row of nothing else."""
    return _wide(logits).log_softmax(-1).masked_fill(logits == -INF, -INF)


def _normaliser(logits: Tensor) -> Tensor:
    largest = _wide(logits).amax(-1)
    return torch.stack([largest, (_wide(logits) - largest[:, None]).exp().sum(-1).log()]).masked_fill(
        largest == -INF, 0
    )


def forward(current: Tensor, previous: Tensor, guidance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 4: guidance p - (guidance - 1) q, p and q the log-probabilities, as p + (guidance - 1) (p - q)."""
    p, q = _log_softmax(current), _log_softmax(previous)
    result = p + (guidance - 1) * (p - q)
    return result.masked_fill(current == -INF, -INF), _normaliser(current), _normaliser(previous)


def backward(
    grad: Tensor,
    current: Tensor,
    previous: Tensor,
    normaliser_current: Tensor,
    normaliser_previous: Tensor,
    guidance: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """d log_softmax(z)_v / dz_w = [v = w] - softmax(z)_w, over the columns v whose result is finite."""
    grad = grad.masked_fill((current == -INF) | (previous == -INF), 0)
    total = grad.sum(-1, keepdim=True)

    def gradient(logits: Tensor, weight: float) -> Tensor:
        return (weight * (grad - _log_softmax(logits).exp() * total)).to(logits.dtype)

    return gradient(current, guidance) if needs[0] else None, gradient(previous, 1 - guidance) if needs[1] else None


def argmax(current: Tensor, previous: Tensor, guidance: float) -> Tensor:
    """argmax of guidance current - (guidance - 1) previous: Eq. 4 but for what is the same in a whole row."""
    x, y = _wide(current), _wide(previous)
    return (x + (guidance - 1) * (x - y)).masked_fill(current == -INF, -INF).argmax(-1)
