"""sigmoid_loss as a differentiable function, eager and under torch.compile.

A backend is two functions: `forward(problem, needs) -> (loss, saved)`, needs saying which of anchors, positives,
negatives, tau and bias will be differentiated and saved being tensors or None; and
`backward(problem, saved, upstream, needs, dtype) -> gradients` of the five, None where not needed: of rows in `dtype`,
of tau and bias in theirs.
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
    "sigmoid",
    ("sigmoid_loss",),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
)


def sigmoid(problem: Problem, backend: str) -> Tensor:
    needs = tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in problem.differentiated)
    module = eager(OP, backend, *problem)
    if module is None:
        return _operator(*problem, needs, backend)[0]
    if any(needs):
        return _Sigmoid.apply(module, *problem)
    return _forward(problem, needs, module)[0]


def _empty(problem: Problem) -> bool:
    return len(problem.anchors) == 0 or problem.column_count == 0


def _forward(problem: Problem, needs: tuple[bool, ...], module: ModuleType) -> tuple[Tensor, tuple]:
    if _empty(problem):
        return _loss_like(problem), ()
    # Autocast would make matrix products of the float32 rows in half precision.
    with torch.autocast(problem.anchors.device.type, enabled=False):
        return module.forward(problem, needs)


def _backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype, module: ModuleType
) -> Gradients:
    if _empty(problem):
        return tuple(
            x.new_zeros(x.shape, dtype=dtype if x.ndim else x.dtype) if need and x is not None else None
            for x, need in zip(problem.differentiated, needs, strict=True)
        )
    with torch.autocast(problem.anchors.device.type, enabled=False):
        return module.backward(problem, saved, upstream, needs, dtype)


def _loss_like(problem: Problem) -> Tensor:
    return problem.anchors.new_zeros((), dtype=wide(problem.anchors.dtype))


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, *fields: Any) -> Tensor:
        problem = Problem(*fields)
        loss, saved = _forward(problem, ctx.needs_input_grad[1:6], module)
        ctx.save_for_backward(*problem, *saved)
        ctx.module = module
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        refuse_second_derivative("sigmoid_loss")
        count = len(Problem._fields)
        problem, saved = Problem(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        needs = ctx.needs_input_grad[1:6]
        grads = _backward(problem, saved, upstream, needs, problem.anchors.dtype, ctx.module)
        return None, *grads, *[None] * (count - len(grads))


def _operator_forward(*inputs):
    """The gradient is made in forward, whatever the backend."""
    *fields, needs, module = inputs
    problem, needs = Problem(*fields), tuple(needs)
    loss, saved = _forward(problem, needs, module)
    if not any(needs):
        return loss, *[None] * len(needs)
    return loss, *_backward(problem, saved, torch.ones_like(loss), needs, loss.dtype, module)


def _shapes(*inputs):
    *fields, needs = inputs
    problem = Problem(*fields)
    loss = _loss_like(problem)
    given = zip(problem.differentiated, needs, strict=True)
    return loss, *(loss.new_empty(x.shape) if need and x is not None else None for x, need in given)


_operator = with_gradients(
    OP,
    "sigmoid",
    "Tensor anchors, Tensor positives, Tensor? negatives, Tensor tau, Tensor bias, Tensor? targets, Tensor? ignored, "
    "Tensor? anchor_ids, Tensor? column_ids, Tensor? anchor_groups, Tensor? column_groups, bool[5] needs",
    5, _operator_forward, _shapes,
)  # fmt: skip
