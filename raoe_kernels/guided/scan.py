"""The guided ops in plain torch, a few rows at a time: of size (R, V) there are only the logits and the result."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._dtypes import wide

INF = float("inf")
# Logits of one context in flight: enough for torch's threads, few enough that a second pass finds them in the cache.
CHUNK = 1 << 18


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, CHUNK // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _looks(logits: Tensor) -> bool:
    """Whether to ask first if any logit is -inf, by a number that is not finite where one is, such as the smallest or a
    sum: to look element by element costs more than a log-softmax. Other devices would have to wait for the answer."""
    return logits.device.type == "cpu"


def forward(current: Tensor, previous: Tensor, guidance: float) -> tuple[Tensor, None, None]:
    """p + (guidance - 1) (p - q) with p, q the log-probabilities: Eq. 4, and exactly p where q = p."""
    dtype = wide(current.dtype)
    result, kept = current.new_empty(current.shape, dtype=dtype), None
    for part in _chunks(current):
        x, y, mixed = current[part], previous[part], result[part]
        if _looks(x):
            # p stands where the mix will, q where the last one stood: memory that is new costs as much as they
            kept = mixed.new_empty(mixed.shape) if kept is None else kept[: len(x)]
            p, q = torch.log_softmax(x, -1, dtype, out=mixed), torch.log_softmax(y, -1, dtype, out=kept)
            if math.isfinite(torch.lerp(q, p, guidance, out=mixed).sum()):
                continue
        p, q = x.log_softmax(-1, dtype=dtype), y.log_softmax(-1, dtype=dtype)
        q.masked_fill_(y == -INF, -INF)  # log_softmax gives NaN for a row of nothing else
        torch.sub(p, q, out=mixed).mul_(guidance - 1).add_(p).masked_fill_(x == -INF, -INF)
    return result, None, None  # torch's own softmax is faster than one from a normaliser


def backward(
    grad: Tensor,
    current: Tensor,
    previous: Tensor,
    of_current: Tensor | None,
    of_previous: Tensor | None,
    guidance: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """guidance (grad - softmax(current) total), and for previous the same with 1 - guidance."""
    by_current, by_previous = (current.new_empty(current.shape) if need else None for need in needs)
    for part in _chunks(current):
        x, y, g = current[part], previous[part], grad[part]
        forbids = not (_looks(x) and math.isfinite(x.amin()) and math.isfinite(y.amin()))
        if forbids:
            g = g.masked_fill((x == -INF) | (y == -INF), 0)
        total = g.sum(-1, keepdim=True)
        for out, logits, weight in ((by_current, x, guidance), (by_previous, y, 1 - guidance)):
            if out is not None:
                softmax = logits.softmax(-1, dtype=g.dtype)
                if forbids:
                    softmax.masked_fill_(logits == -INF, 0)  # NaN for a row of nothing else
                torch.add(softmax.mul_(-weight * total), g, alpha=weight, out=out[part])
    return by_current, by_previous


def argmax(current: Tensor, previous: Tensor, guidance: float) -> Tensor:
    """argmax of x + (guidance - 1) (x - y), which is guidance x - (guidance - 1) y, and exactly x where y = x."""
    best = current.new_empty(len(current), dtype=torch.int64)
    for part in _chunks(current):
        x, y = (logits[part].to(wide(current.dtype)) for logits in (current, previous))
        if not (_looks(x) and math.isfinite((scores := torch.lerp(y, x, guidance)).sum())):
            scores = (x - y).mul_(guidance - 1).add_(x).masked_fill_(x == -INF, -INF)
        best[part] = scores.argmax(-1)
    return best
