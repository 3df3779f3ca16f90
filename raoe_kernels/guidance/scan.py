"""The guided ops in plain torch, a few rows at a time: of size (R, V) there are only the logits and the result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

INF = float("inf")
# Logits of one context in flight: enough for torch's threads, few enough that a second pass finds them in the cache.
CHUNK = 1 << 18


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, CHUNK // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _log_softmax(logits: Tensor, normaliser: Tensor, out: Tensor | None = None) -> Tensor:
    """Writes the rows' normaliser (2, R) too. 0 in its place in rows of only -inf leaves them what they are."""
    largest = logits.amax(-1)
    normaliser[0] = largest.masked_fill_(largest == -INF, 0)
    result = torch.sub(logits, largest[:, None], out=out)
    total = result.exp().sum(-1)
    normaliser[1] = total.masked_fill_(total == 0, 1).log_()
    return result.sub_(total[:, None])


def forward(current: Tensor, previous: Tensor, guidance: float) -> tuple[Tensor, Tensor, Tensor]:
    """p + (guidance - 1) (p - q) with p, q the log-probabilities: Eq. 4, and exactly p where q = p."""
    dtype = _wide(current)
    result = current.new_empty(current.shape, dtype=dtype)
    normalisers = result.new_empty(2, len(current)), result.new_empty(2, len(current))
    for part in _chunks(current):
        x, y = current[part].to(dtype), previous[part].to(dtype)
        p = _log_softmax(x, normalisers[0][:, part], result[part])
        p_minus_q = _log_softmax(y, normalisers[1][:, part]).neg_().add_(p)
        p.add_(p_minus_q, alpha=guidance - 1).masked_fill_(x == -INF, -INF)
    return result, *normalisers


def backward(
    grad: Tensor,
    current: Tensor,
    previous: Tensor,
    normaliser_current: Tensor,
    normaliser_previous: Tensor,
    guidance: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """guidance (grad - softmax(current) total), and for previous the same with 1 - guidance."""
    by_current, by_previous = (current.new_empty(current.shape) if need else None for need in needs)
    for part in _chunks(current):
        x, y = current[part], previous[part]
        g = grad[part].masked_fill((x == -INF) | (y == -INF), 0)
        total = g.sum(-1, keepdim=True)
        if by_current is not None:
            _gradient(by_current[part], x, normaliser_current[:, part], g, total, guidance)
        if by_previous is not None:
            _gradient(by_previous[part], y, normaliser_previous[:, part], g, total, 1 - guidance)
    return by_current, by_previous


def _gradient(out: Tensor, logits: Tensor, normaliser: Tensor, grad: Tensor, total: Tensor, weight: float) -> None:
    largest, log_sum = normaliser[..., None]
    softmax = (logits - largest).sub_(log_sum).exp_().masked_fill_(logits == -INF, 0)
    out.copy_(softmax.mul_(total).neg_().add_(grad).mul_(weight))


def argmax(current: Tensor, previous: Tensor, guidance: float) -> Tensor:
    """argmax of x + (guidance - 1) (x - y), which is guidance x - (guidance - 1) y, and exactly x where y = x."""
    best = current.new_empty(len(current), dtype=torch.int64)
    for part in _chunks(current):
        x = current[part].to(_wide(current))
        scores = x - previous[part]
        scores.mul_(guidance - 1).add_(x).masked_fill_(x == -INF, -INF)
        best[part] = scores.argmax(-1)
    return best
