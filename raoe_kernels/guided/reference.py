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


def _log_sum_exp(logits: Tensor) -> Tensor:
    total = _wide(logits).logsumexp(-1)
    return total.masked_fill(total == INF, torch.nan).masked_fill(total == -INF, 0)


def forward(current: Tensor, previous: Tensor, guidance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 4: guidance log p(current) - (guidance - 1) log p(previous); -inf where current is."""
    result = _log_softmax(current)
    if guidance != 1:
        result = guidance * result - (guidance - 1) * _log_softmax(previous)
    return result.masked_fill(current == -INF, -INF), _log_sum_exp(current), _log_sum_exp(previous)


def backward(
    grad: Tensor,
    current: Tensor,
    previous: Tensor,
    lse_current: Tensor,
    lse_previous: Tensor,
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
    scores = _wide(current)
    if guidance != 1:
        scores = scores + (guidance - 1) * (scores - _wide(previous))
    return scores.masked_fill(current == -INF, -INF).argmax(-1)
