"""list_mle_loss and list_net_loss as differentiable functions, refine_similarity beside them, eager and under
torch.compile.

A backend is three functions. wide is float64 for float64 inputs and float32 otherwise, n is at least 1:
`list_mle(student, teacher, mask, order, tau, need_grad) -> (loss, gradient (R, n) or None)`, both wide; the mean is
made here. Of teacher's equals the one with the smaller order comes first, if there is an order.
`list_net(student, teacher, mask, tau, teacher_tau, need_grad)`, the same.
`refine(phi (C, n, n), mask (C, n), omega) -> (C, n, n)`, wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative
from .._dtypes import wide
from .._operator import eager, operator, with_gradients

OP = Op(
    "listwise",
    ("list_mle_loss", "list_net_loss", "refine_similarity"),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
    },
)


def list_mle(
    student: Tensor, teacher: Tensor, mask: Tensor | None, order: Tensor | None, tau: float, backend: str
) -> Tensor:
    return _called("list_mle_loss", _mle, _list_mle_operator, backend, student, teacher, mask, order, tau)


def list_net(
    student: Tensor, teacher: Tensor, mask: Tensor | None, tau: float, teacher_tau: float, backend: str
) -> Tensor:
    return _called("list_net_loss", _net, _list_net_operator, backend, student, teacher, mask, tau, teacher_tau)


def refine(phi: Tensor, mask: Tensor | None, omega: float, backend: str) -> Tensor:
    module = eager(OP, backend, phi, mask)
    return _refine_operator(phi, mask, omega, backend) if module is None else _refine(phi, mask, omega, module)


def _called(name: str, run: Callable[..., Any], operator: Any, backend: str, student: Tensor, *others: Any) -> Tensor:
    need_grad = student.requires_grad and torch.is_grad_enabled()
    module = eager(OP, backend, student)
    if module is None:
        return operator(student, *others, need_grad, backend)[0]
    if need_grad:
        return _Listwise.apply(student, name, run, *others, True, module)
    return run(student, *others, False, module)[0]


def _mle(student, teacher, mask, order, tau, need_grad, module):
    return _mean(
        student, teacher, mask, need_grad, lambda: module.list_mle(student, teacher, mask, order, tau, need_grad)
    )


def _net(student, teacher, mask, tau, teacher_tau, need_grad, module):
    return _mean(
        student, teacher, mask, need_grad, lambda: module.list_net(student, teacher, mask, tau, teacher_tau, need_grad)
    )


def _mean(
    student: Tensor, teacher: Tensor, mask: Tensor | None, need_grad: bool, summed: Callable[[], Any]
) -> tuple[Tensor, Tensor | None]:
    """The mean loss and its gradient; both NaN, but for what is masked, where a value is NaN."""
    if student.numel() == 0:
        loss = student.new_zeros((), dtype=wide(student.dtype))
        return loss, student.new_zeros(student.shape, dtype=wide(student.dtype)) if need_grad else None
    loss, grad = summed()
    loss = loss / student.shape[0]
    if teacher.is_floating_point():
        broken = teacher.isnan()
        broken = (broken if mask is None else broken & mask).any()
        loss = loss.masked_fill(broken, torch.nan)
    if grad is None:
        return loss, None
    grad = (grad / student.shape[0]).masked_fill(loss.isnan(), torch.nan)
    return loss, grad if mask is None else grad.masked_fill(~mask, 0)


def _refine(phi: Tensor, mask: Tensor | None, omega: float, module: Any) -> Tensor:
    if phi.numel() == 0:
        return phi.new_empty(phi.shape, dtype=wide(phi.dtype))
    n = phi.shape[-1]
    lists = None if mask is None else mask.reshape(-1, n)
    return module.refine(phi.detach().reshape(-1, n, n), lists, omega).reshape(phi.shape)


class _Listwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, name: str, run: Callable[..., Any], *others: Any) -> Tensor:
        loss, grad = run(student, *others)
        ctx.save_for_backward(grad)
        ctx.name, ctx.dtype, ctx.count = name, student.dtype, len(others)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        refuse_second_derivative(ctx.name)
        (grad,) = ctx.saved_tensors
        return (grad * upstream).to(ctx.dtype), None, None, *[None] * ctx.count


def _shapes(student, *others):
    dtype, need_grad = wide(student.dtype), others[-1]
    return student.new_empty((), dtype=dtype), student.new_empty(student.shape, dtype=dtype) if need_grad else None


_list_mle_operator = with_gradients(
    OP,
    "list_mle",
    "Tensor student, Tensor teacher, Tensor? mask, Tensor? order, float tau, bool need_grad",
    1, _mle, _shapes,
)  # fmt: skip
_list_net_operator = with_gradients(
    OP,
    "list_net",
    "Tensor student, Tensor teacher, Tensor? mask, float tau, float teacher_tau, bool need_grad",
    1, _net, _shapes,
)  # fmt: skip
_refine_operator = operator(
    OP, "refine_similarity", "Tensor phi, Tensor? mask, float omega", 1, _refine,
    lambda phi, *_: phi.new_empty(phi.shape, dtype=wide(phi.dtype)),
)  # fmt: skip
