"""Guided ops in plain torch, a few rows at a time. Only the logits and the result have the full size (R, V)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .problem import Problem

# Number of logits for each context in a chunk: enough to occupy torch's threads, few enough to stay in the cache for
# two passes.
CHUNK = 1 << 18


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, CHUNK // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _test_first(logits: Tensor) -> bool:
    """Return True on a CPU, where each chunk is first tested for logits of -inf. If the chunk contains none, the
    elementwise handling of -inf is skipped. The test reads a sum or a minimum, which is not finite if a logit is -inf.
    On other devices, reading this number would make the host wait."""
    return logits.device.type == "cpu"


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Compute Eq. 4 as p + (guidance - 1) (p - q) from log-probabilities p and q. If q = p, the result is exactly p."""
    (current, previous), guidance = problem.logits, problem.guidance
    dtype = wide(current.dtype)
    result, buffer = current.new_empty(current.shape, dtype=dtype), None
    for part in _chunks(current):
        x, y, out = current[part], previous[part], result[part]
        if _test_first(x):
            # Write p to the result and q to a buffer that all chunks reuse: allocating memory would take as long as the
            # softmax.
            buffer = out.new_empty(out.shape) if buffer is None else buffer[: len(x)]
            p, q = torch.log_softmax(x, -1, dtype, out=out), torch.log_softmax(y, -1, dtype, out=buffer)
            if math.isfinite(torch.lerp(q, p, guidance, out=out).sum()):
                continue
        p, q = x.log_softmax(-1, dtype=dtype), y.log_softmax(-1, dtype=dtype)
        q.masked_fill_(y == -torch.inf, -torch.inf)  # log_softmax gives NaN if a whole row is -inf
        torch.sub(p, q, out=out).mul_(guidance - 1).add_(p).masked_fill_(x == -torch.inf, -torch.inf)
    return result, (None, None)  # no normalisers: backward calls torch's softmax, which is faster


def backward(problem: Problem, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Return the gradients with respect to both contexts' logits: guidance (grad - softmax(current) total) and (1 -
    guidance) (grad - softmax(previous) total). Here, grad is the upstream gradient, and total is its sum over a row."""
    (current, previous), guidance = problem.logits, problem.guidance
    by_current, by_previous = (current.new_empty(current.shape) if need else None for need in problem.reads(needs))
    for part in _chunks(current):
        x, y, g = current[part], previous[part], upstream[part]
        has_inf = not (_test_first(x) and math.isfinite(x.amin()) and math.isfinite(y.amin()))
        if has_inf:
            g = g.masked_fill((x == -torch.inf) | (y == -torch.inf), 0)
        total = g.sum(-1, keepdim=True)
        for out, logits, weight in ((by_current, x, guidance), (by_previous, y, 1 - guidance)):
            if out is not None:
                softmax = logits.softmax(-1, dtype=g.dtype)
                if has_inf:
                    softmax.masked_fill_(logits == -torch.inf, 0)  # softmax is NaN if a whole row is -inf
                torch.add(softmax.mul_(-weight * total), g, alpha=weight, out=out[part])
    return by_current, by_previous


def argmax(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the argmax of x + (guidance - 1) (x - y), where x and y are the logits for the current and the previous
    context. If y = x, the compared values are exactly x."""
    (current, previous), guidance = problem.logits, problem.guidance
    best = current.new_empty(len(current), dtype=torch.int64)
    for part in _chunks(current):
        x, y = (logits[part].to(wide(current.dtype)) for logits in (current, previous))
        if not (_test_first(x) and math.isfinite((scores := torch.lerp(y, x, guidance)).sum())):
            scores = (x - y).mul_(guidance - 1).add_(x).masked_fill_(x == -torch.inf, -torch.inf)
        best[part] = scores.argmax(-1)
    return best, ()
