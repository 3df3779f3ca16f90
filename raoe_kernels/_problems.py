"""Differentiable losses of a problem (a NamedTuple of a call's arguments), eager and under torch.compile.

A backend has two functions. `forward(problem, needs)` returns (loss, saved). `needs` has a
bool for each of the problem's first fields, True if its gradient is needed; `saved` is a tuple
of tensors or None. `backward(problem, saved, upstream, needs, dtype)` returns these gradients,
None if not needed: gradients of rows in `dtype`, gradients of () tensors in the loss's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._dispatch import Op, refuse_second_derivative
from ._dtypes import wide, without_autocast
from ._operator import eager, with_gradients

Needs = tuple[bool, ...]
Gradients = tuple[Tensor | None, ...]


def differentiable(
    op: Op, make: Callable[..., Any], arguments: str, gradients: int, is_empty: Callable[[Any], bool]
) -> Callable[[Any, str], Tensor]:
    """Return the function loss(problem, backend), and register its operator under the op's key.

    make            the problem's NamedTuple; its first field determines device and dtype
    arguments       its fields in schema notation, tensors first
    gradients       number of leading fields that are differentiated
    is_empty        function of a problem: True if its loss is 0, so that no backend has to run
    """
    function = op.functions[0]
    count, tensors = arguments.count(",") + 1, arguments.count("Tensor")

    def loss(problem: Any, backend: str) -> Tensor:
        first = problem[:gradients]
        needs = tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in first)
        module = eager(op, backend, *problem[:tensors])
        if module is None:
            return operator(*problem, needs, backend)[0]
        if any(needs):
            return Loss.apply(module, *problem)
        return forward(problem, needs, module)[0]

    def forward(problem: Any, needs: Needs, module: ModuleType) -> tuple[Tensor, tuple]:
        if is_empty(problem):
            return _loss_like(problem[0]), ()
        with without_autocast(problem[0]):
            return _serving(module, problem).forward(problem, needs)

    def backward(
        problem: Any, saved: tuple, upstream: Tensor, needs: Needs, dtype: torch.dtype, module: ModuleType
    ) -> Gradients:
        if is_empty(problem):
            return tuple(
                x.new_zeros(x.shape, dtype=dtype) if need and x is not None else None
                for x, need in zip(problem[:gradients], needs, strict=True)
            )
        with without_autocast(problem[0]):
            return _serving(module, problem).backward(problem, saved, upstream, needs, dtype)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, module: ModuleType, *fields: Any) -> Tensor:
            problem = make(*fields)
            loss_value, saved = forward(problem, ctx.needs_input_grad[1 : 1 + gradients], module)
            ctx.save_for_backward(*fields[:tensors], *saved)
            ctx.options, ctx.module = fields[tensors:], module
            return loss_value

        @staticmethod
        def backward(ctx: Any, upstream: Tensor):
            refuse_second_derivative(function)
            # Read saved_tensors only once: torch's checkpointing does not allow a second read.
            inputs, saved = (tensors_saved := ctx.saved_tensors)[:tensors], tensors_saved[tensors:]
            problem, needs = make(*inputs, *ctx.options), ctx.needs_input_grad[1 : 1 + gradients]
            grads = backward(problem, saved, upstream, needs, inputs[0].dtype, ctx.module)
            return None, *grads, *[None] * (count - len(grads))  # autograd casts gradients of () tensors

    def operator_forward(*inputs):
        """Compute loss and gradients together, for every backend."""
        *fields, needs, module = inputs
        problem, needs = make(*fields), tuple(needs)
        loss_value, saved = forward(problem, needs, module)
        if not any(needs):
            return loss_value, *[None] * gradients
        return loss_value, *backward(problem, saved, torch.ones_like(loss_value), needs, loss_value.dtype, module)

    def shapes(*inputs):
        *fields, needs = inputs
        loss_value = _loss_like(fields[0])
        pairs = zip(fields[:gradients], needs, strict=True)
        return loss_value, *(loss_value.new_empty(x.shape) if need and x is not None else None for x, need in pairs)

    operator = with_gradients(op, op.key, f"{arguments}, bool[{gradients}] needs", gradients, operator_forward, shapes)
    return loss


def _serving(module: Any, problem: Any) -> Any:
    """Return the module itself, or the module that it chooses for this call."""
    return module.serving(problem) if hasattr(module, "serving") else module


def backward(problem: Any, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Backward for backends that compute the gradients in forward."""
    return tuple(None if g is None else (g * upstream).to(dtype if g.ndim else g.dtype) for g in saved)


def _loss_like(rows: Tensor) -> Tensor:
    return rows.new_zeros((), dtype=wide(rows.dtype))
