"""list_mle_loss as a differentiable function and refine_similarity beside it, eager and under torch.compile.

A backend is two functions. wide is float64 for float64 inputs and float32 otherwise, n is at least 1:
`list_mle(student, teacher, mask, order, scale, need_grad) -> (loss, gradient (R, n) or None)`, both wide; the mean is
made here. Of teacher's equals the one with the smaller order comes first, if there is an order.
`refine(phi (C, n, n), mask (C, n), omega) -> (C, n, n)`, wide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative
from .._dtypes import wide
from .._operator import eager, operator, with_gradients

OP = Op(
    "listwise",
    ("list_mle_loss", "refine_similarity"),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
    },
)


def list_mle(
    student: Tensor, teacher: Tensor, mask: Tensor | None, order: Tensor | None, scale: float, backend: str
) -> Tensor:
    inputs = student, teacher, mask, order, scale, student.requires_grad and torch.is_grad_enabled()
    module = eager(OP, backend, student)
    if module is None:
        return _list_mle_operator(*inputs, backend)[0]
    return _ListMLE.apply(*inputs, module) if inputs[-1] else _mean(*inputs, module)[0]


def refine(phi: Tensor, mask: Tensor | None, omega: float, backend: str) -> Tensor:
    module = eager(OP, backend, phi, mask)
    return _refine_operator(phi, mask, omega, backend) if module is None else _refine(phi, mask, omega, module)


def _mean(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    order: Tensor | None,
    scale: float,
    need_grad: bool,
    module: Any,
) -> tuple[Tensor, Tensor | None]:
    """The mean loss and its gradient; both NaN, but for what is masked, where a value is NaN."""
    if student.numel() == 0:
        loss = student.new_zeros((), dtype=wide(student.dtype))
        return loss, student.new_zeros(student.shape, dtype=wide(student.dtype)) if need_grad else None
    loss, grad = module.list_mle(student, teacher, mask, order, scale, need_grad)
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


class _ListMLE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, *others: Any) -> Tensor:
        loss, grad = _mean(student, *others)
        ctx.save_for_backward(grad)
        ctx.dtype, ctx.count = student.dtype, len(others)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        refuse_second_derivative("list_mle_loss")
        (grad,) = ctx.saved_tensors
        return (grad * upstream).to(ctx.dtype), *[None] * ctx.count


def _shapes(student, *others):
    dtype, need_grad = wide(student.dtype), others[-1]
    return student.new_empty((), dtype=dtype), student.new_empty(student.shape, dtype=dtype) if need_grad else None


_list_mle_operator = with_gradients(
    OP,
    "list_mle",
    "Tensor student, Tensor teacher, Tensor? mask, Tensor? order, float scale, bool need_grad",
    1, _mean, _shapes,
)  # fmt: skip
_refine_operator = operator(
    OP, "refine_similarity", "Tensor phi, Tensor? mask, float omega", 1, _refine,
    lambda phi, *_: phi.new_empty(phi.shape, dtype=wide(phi.dtype)),
)  # fmt: skip
