"""The public functions of dual-context guidance: what a call means, and its argument errors."""

from __future__ import annotations

from torch import Tensor

from .. import _validate
from .autograd import argmax, log_probs


def guided_log_probs(current: Tensor, previous: Tensor, *, guidance: float, backend: str = "auto") -> Tensor:
    """Log-probabilities of the next token, led from the previous context towards the current one.

    guidance x log_softmax(current) - (guidance - 1) x log_softmax(previous), over the last dimension: Eq. 4 of the
    ranking-sentences paper with guidance = 1 + lambda (1.5 there), as it stands, so a row's probabilities do not sum to
    1. It is what transformers' UnbatchedClassifierFreeGuidanceLogitsProcessor gives for finite logits.

    Where current is -inf (a forbidden token) the result is -inf, whatever previous is. Where only previous is -inf it
    is +inf for guidance > 1 and -inf below, as Eq. 4 says (transformers' form gives NaN). A NaN or +inf logit makes the
    rest of its row NaN. With guidance 1 previous is ignored, NaN and all; with current = previous the result is
    exactly log_softmax(current).

    Args:
        current: (..., V) logits after the nearer context, float16, bfloat16, float32 or float64.
        previous: (..., V) logits after the farther context, of current's shape, dtype and device.
        guidance: finite, >= 0; it is 1 + lambda and not lambda. Below 1 the contexts are interpolated.
        backend: "auto", "reference", "scan" (plain torch, a few rows at a time) or "triton".

    Returns:
        (..., V) float32, float64 for float64 logits. Differentiable in both; gradients have the logits' dtype. What
        is infinite is constant: the gradient that comes from above is ignored there, and current's is 0.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here, or a second derivative was asked for.
    """
    _check(current, previous)
    rows = log_probs(_rows(current), _rows(previous), _validate.number("guidance", guidance, low=0), backend)
    return rows if current.ndim == 2 else rows.reshape(current.shape)


def guided_argmax(current: Tensor, previous: Tensor, *, guidance: float, backend: str = "auto") -> Tensor:
    """The token that guided_log_probs likes best, without its normalisers: argmax of g current - (g - 1) previous.

    Greedy decoding by Eq. 4 of the ranking-sentences paper. The first of equals wins; a token whose current logit is
    -inf is taken only where all of them are (then it is token 0); a NaN counts as the largest, as for torch.argmax.
    Values are compared in float32 (float64 for float64 logits) after rounding.

    Args:
        current, previous, guidance, backend: as for guided_log_probs; V at least 1.

    Returns:
        (...) int64. Not differentiable.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here.
    """
    _check(current, previous)
    if current.shape[-1] == 0:
        raise ValueError(f"current must have at least one token to choose from, got {_validate.describe(current)}")
    best = argmax(_rows(current), _rows(previous), _validate.number("guidance", guidance, low=0), backend)
    return best if current.ndim == 2 else best.reshape(current.shape[:-1])


def _check(current: Tensor, previous: Tensor) -> None:
    for name, value in (("current", current), ("previous", previous)):
        _validate.float_tensor(name, value, max(1, getattr(value, "ndim", 1)))
    _validate.alike("current and previous", current, previous)


def _rows(logits: Tensor) -> Tensor:
    return logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
