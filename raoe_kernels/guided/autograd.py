"""guided_log_probs as a differentiable function, and guided_argmax, eager and under torch.compile.

A backend has three functions on rows (R, V) with V > 0:
`forward(current, previous, guidance) -> (result (R, V), normaliser of current, normaliser of previous)`, all float64
for float64 logits, otherwise float32. A normaliser (2, R) holds each row's largest logit z and
log(sum exp(logit - z)), both 0 for a row of only -inf; it is None if the backend's backward does not read it.
`backward(grad, current, previous, normaliser of current, normaliser of previous, guidance, (need current, need
previous))` returns gradients, None if not needed; and `argmax(current, previous, guidance) -> (R,)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._operator import eager, operator, with_backward

OP = Op(
    "guided",
    ("guided_log_probs", "guided_argmax"),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
)


def log_probs(current: Tensor, previous: Tensor, guidance: float, backend: str) -> Tensor:
    module = eager(OP, backend, current, previous)
    if module is None:
        return _operator(current, previous, guidance, backend)[0]
    if torch.is_grad_enabled() and (current.requires_grad or previous.requires_grad):
        return _Guided.apply(current, previous, guidance, module)
    return _forward(current, _second_logits(current, previous, guidance), guidance, module)[0]


def argmax(current: Tensor, previous: Tensor, guidance: float, backend: str) -> Tensor:
    current, previous = current.detach(), previous.detach()
    module = eager(OP, backend, current, previous)
    if module is None:
        return _argmax_operator(current, previous, guidance, backend)
    return _argmax(current, previous, guidance, module)


def _second_logits(current: Tensor, previous: Tensor, guidance: float) -> Tensor:
    """Return previous, or current if guidance is 1: the result then depends on current only, and previous is unread."""
    return current if guidance == 1 else previous


def _forward(
    current: Tensor, other: Tensor, guidance: float, module: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return module.forward(current, other, guidance) if current.numel() else _empty(current)


def _empty(current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty results with the right shapes and dtypes."""
    dtype = wide(current.dtype)
    result = current.new_empty(current.shape, dtype=dtype)
    return result, result.new_zeros(2, current.shape[0]), result.new_zeros(2, current.shape[0])


def _backward(
    grad: Tensor, saved: tuple[Tensor, ...], guidance: float, needs: tuple[bool, bool], module: Any
) -> tuple[Tensor | None, Tensor | None]:
    current = saved[0]
    reads = needs[0], needs[1] and guidance != 1
    grads: tuple[Tensor | None, ...] = (None, None)
    if any(reads) and current.numel():
        grads = module.backward(grad, *saved, guidance, reads)
    results = [current.new_zeros(current.shape) if n and g is None else g for g, n in zip(grads, needs, strict=True)]
    return results[0], results[1]


def _argmax(current: Tensor, previous: Tensor, guidance: float, module: Any) -> Tensor:
    if current.shape[0] == 0:
        return current.new_empty(0, dtype=torch.int64)
    return module.argmax(current, _second_logits(current, previous, guidance), guidance)


class _Guided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, current: Tensor, previous: Tensor, guidance: float, module: Any) -> Tensor:
        other = _second_logits(current, previous, guidance)
        result, *normalisers = _forward(current, other, guidance, module)
        ctx.save_for_backward(current, other, *normalisers)
        ctx.guidance, ctx.module = guidance, module
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        refuse_second_derivative("guided_log_probs")
        return *_backward(grad, ctx.saved_tensors, ctx.guidance, ctx.needs_input_grad[:2], ctx.module), None, None


_ARGUMENTS = "Tensor current, Tensor previous, float guidance"


def _operator_forward(current, previous, guidance, module):
    results = _forward(current, _second_logits(current, previous, guidance), guidance, module)
    return tuple(empty if x is None else x for x, empty in zip(results, _empty(current), strict=True))


def _operator_backward(grad, current, previous, guidance, of_current, of_previous, needs, module):
    saved = current, _second_logits(current, previous, guidance), of_current, of_previous
    return _backward(grad, saved, guidance, tuple(needs), module)


_operator = with_backward(
    OP, "guided", _ARGUMENTS, 3, _operator_forward, lambda current, *_: _empty(current), _operator_backward,
    gradients=2, unsaved=1,
)  # fmt: skip
_argmax_operator = operator(
    OP, "guided_argmax", _ARGUMENTS, 1, _argmax,
    lambda current, *_: current.new_empty(current.shape[0], dtype=torch.int64),
)  # fmt: skip
