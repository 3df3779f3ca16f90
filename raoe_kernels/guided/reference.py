"""Reference implementation of the guided ops and their gradients, for any dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .problem import Problem


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log_softmax, with -inf for a logit of -inf even in a row where all logits are -inf."""
    return logits.to(wide(logits.dtype)).log_softmax(-1).masked_fill(logits == -torch.inf, -torch.inf)


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Compute guidance x p - (guidance - 1) x q (Eq. 4) as p + (guidance - 1) x (p - q), where p and q are the
    log-probabilities given the current and the previous context."""
    p, q = map(_log_softmax, problem.logits)
    result = p + (problem.guidance - 1) * (p - q)
    return result.masked_fill(problem.current == -torch.inf, -torch.inf), (None, None)


def backward(problem: Problem, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Return the gradients with respect to the logits z. The derivative d log_softmax(z)_v / dz_w is [v = w] -
    softmax(z)_w, where [v = w] is 1 if v = w, else 0. The derivatives are weighted by the upstream gradient, and summed
    over the columns v whose result is finite."""
    (current, previous), guidance = problem.logits, problem.guidance
    grad = upstream.masked_fill((current == -torch.inf) | (previous == -torch.inf), 0)
    total = grad.sum(-1, keepdim=True)

    def gradient(logits: Tensor, weight: float) -> Tensor:
        return (weight * (grad - _log_softmax(logits).exp() * total)).to(dtype)

    first, second = problem.reads(needs)
    return gradient(current, guidance) if first else None, gradient(previous, 1 - guidance) if second else None


def argmax(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the argmax of guidance x - (guidance - 1) y, where x and y are the logits for the current and the previous
    context. This expression equals Eq. 4 up to a constant per row."""
    x, y = (logits.to(wide(logits.dtype)) for logits in problem.logits)
    return (x + (problem.guidance - 1) * (x - y)).masked_fill(x == -torch.inf, -torch.inf).argmax(-1), ()
