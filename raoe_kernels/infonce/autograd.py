"""info_nce_loss as a differentiable function, eager and under torch.compile.

A backend is two functions: `forward(problem, needs) -> (loss, saved)`, needs saying which of `problem.differentiated`
will be differentiated and saved being tensors or None; and `backward(problem, saved, upstream, needs, dtype) ->
gradients` of them in `dtype`, tau's in the loss's, None where not needed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._operator import eager, with_gradients
from .problem import Gradients, Problem

OP = Op(
    "infonce",
    ("info_nce_loss",),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
    {"cuda": f"{__package__}.by_case"},
)
_GRADIENTS = 5  # fields of a Problem that are differentiated, from the first on
_TENSORS = 14  # leading fields of a Problem; numbers follow


def info_nce(problem: Problem, backend: str) -> Tensor:
    needs = tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in problem.differentiated)
    module = eager(OP, backend, *problem[:14])
    if module is None:
        return _operator(*problem, needs, backend)[0]
    if any(needs):
        return _InfoNCE.apply(module, *problem)
    return _forward(problem, needs, module)[0]


def _forward(problem: Problem, needs: tuple[bool, ...], module: ModuleType) -> tuple[Tensor, tuple]:
    if len(problem.anchors) == 0:
        return _loss_like(problem), ()
    # Autocast would make matrix products of the float32 rows in half precision.
    with torch.autocast(problem.anchors.device.type, enabled=False):
        return module.forward(problem, needs)


def _backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype, module: ModuleType
) -> Gradients:
    if len(problem.anchors) == 0:
        return tuple(
            x.new_zeros(x.shape, dtype=dtype) if need and x is not None else None
            for x, need in zip(problem.differentiated, needs, strict=True)
        )
    with torch.autocast(problem.anchors.device.type, enabled=False):
        return module.backward(problem, saved, upstream, needs, dtype)


def _loss_like(problem: Problem) -> Tensor:
    return problem.anchors.new_zeros((), dtype=wide(problem.anchors.dtype))


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, *fields: Any) -> Tensor:
        problem = Problem(*fields)
        loss, saved = _forward(problem, ctx.needs_input_grad[1 : 1 + _GRADIENTS], module)
        ctx.save_for_backward(*problem[:_TENSORS], *saved)
        ctx.options, ctx.module = problem[_TENSORS:], module
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        refuse_second_derivative("info_nce_loss")
        tensors = ctx.saved_tensors
        problem, saved = Problem(*tensors[:_TENSORS], *ctx.options), tensors[_TENSORS:]
        dtype = problem.anchors.dtype
        grads = _backward(problem, saved, upstream, ctx.needs_input_grad[1 : 1 + _GRADIENTS], dtype, ctx.module)
        if grads[-1] is not None and problem.learnt_tau is not None:
            grads = *grads[:-1], grads[-1].to(problem.learnt_tau.dtype)
        return None, *grads, *[None] * (len(problem) - _GRADIENTS)


def _operator_forward(*inputs):
    """The gradient is made in forward, whatever the backend."""
    *fields, needs, module = inputs
    problem, needs = Problem(*fields), tuple(needs)
    loss, saved = _forward(problem, needs, module)
    if not any(needs):
        return loss, *[None] * _GRADIENTS
    return loss, *_backward(problem, saved, torch.ones_like(loss), needs, loss.dtype, module)


def _shapes(*inputs):
    *fields, needs = inputs
    problem = Problem(*fields)
    loss = _loss_like(problem)
    rows = zip(problem.differentiated, needs, strict=True)
    return loss, *(loss.new_empty(x.shape) if need and x is not None else None for x, need in rows)


_operator = with_gradients(
    OP,
    "infonce",
    "Tensor anchors, Tensor positives, Tensor? negatives, Tensor? all_anchors, Tensor? learnt_tau, Tensor? targets, "
    "Tensor? ignored, Tensor? anchor_ids, Tensor? column_ids, Tensor? anchor_labels, Tensor? column_labels, "
    "Tensor? guide_anchors, Tensor? guide_positives, Tensor? guide_negatives, float tau, str[] directions, bool joint, "
    "str hardness, float strength, float debias, float margin, bool relative, bool[5] needs",
    _GRADIENTS, _operator_forward, _shapes,
)  # fmt: skip
