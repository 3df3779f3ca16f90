"""Public functions for dual-context guidance: documentation and argument checks."""

from __future__ import annotations

from torch import Tensor

from .. import _validate
from .problem import Problem, argmax, log_probs


@_validate.public
def guided_log_probs(current: Tensor, previous: Tensor, *, guidance: float, backend: str = "auto") -> Tensor:
    """Next-token log-probabilities, shifted from the previous context towards the current context.

    The result is guidance x log_softmax(current) - (guidance - 1) x log_softmax(previous), over the last dimension.
    This is Eq. 4 of the ranking-sentences paper with guidance = 1 + lambda (1.5 in the paper). As in the paper, the
    result is not normalized: the probabilities of a row do not sum to 1. For finite logits, the result equals that of
    transformers' UnbatchedClassifierFreeGuidanceLogitsProcessor.

    A logit of -inf in `current` forbids its token: the token's result is -inf, regardless of `previous`. If only the
    logit in `previous` is -inf, the result is +inf for guidance > 1 and -inf for guidance < 1, as Eq. 4 implies. In
    transformers, the result is NaN in this case. A NaN or +inf logit makes all results in its row NaN, except for
    forbidden tokens. If guidance is 1, `previous` is ignored. If `current` and `previous` are equal, the result is
    exactly their log_softmax.

    Args:
        current: (..., V) next-token logits given the current context, float16, bfloat16, float32 or float64.
        previous: (..., V) next-token logits given the previous context, with current's shape, dtype and device.
        guidance: finite number >= 0: the paper's 1 + lambda, not lambda. A value below 1 interpolates between the two
            contexts.
        backend: "auto", "reference", "scan" (plain torch, a few rows at a time) or "triton".

    Returns:
        (..., V) log-probabilities, float64 for float64 logits, otherwise float32. They are differentiable in current
        and previous, and the gradients have the logits' dtype. The upstream gradient of an infinite result is ignored.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here, or a second derivative was requested.
    """
    rows = log_probs(_problem(current, previous, guidance), backend)
    return rows if current.ndim == 2 else rows.reshape(current.shape)


@_validate.public
def guided_argmax(current: Tensor, previous: Tensor, *, guidance: float, backend: str = "auto") -> Tensor:
    """Index of the token with the largest value of guided_log_probs, computed without a softmax.

    The result is the argmax of guidance x current - (guidance - 1) x previous: greedy decoding with Eq. 4 of the
    ranking-sentences paper. If several tokens have the largest value, the first one is returned. A logit of -inf in
    `current` forbids its token. If all logits in `current` are -inf, the result is 0. NaN counts as the largest value,
    as in torch.argmax. Values are compared after they are rounded to float32 (float64 for float64 logits).

    Args:
        current, previous, guidance, backend: as for guided_log_probs; V must be at least 1.

    Returns:
        (...) int64 token indices, which are not differentiable.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: the requested backend cannot run here.
    """
    problem = _problem(current, previous, guidance)
    problem = problem._replace(current=problem.current.detach(), previous=problem.previous.detach())
    if current.shape[-1] == 0:
        raise ValueError(f"current must have at least one token in each row, got {_validate.describe(current)}")
    best = argmax(problem, backend)
    return best if current.ndim == 2 else best.reshape(current.shape[:-1])


def _problem(current: Tensor, previous: Tensor, guidance: object) -> Problem:
    for name, value in (("current", current), ("previous", previous)):
        _validate.float_tensor(name, value, max(1, getattr(value, "ndim", 1)))
    _validate.alike("current and previous", current, previous)
    if current.ndim != 2:
        current, previous = (x.flatten(0, -2) if x.ndim > 1 else x[None] for x in (current, previous))
    return Problem(current, previous, _validate.number("guidance", guidance, low=0))
