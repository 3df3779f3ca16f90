"""pairwise_cosine as a differentiable function, eager and under torch.compile.

A backend is two functions: `forward(a, b, eps) -> (c, 1 / |a|, 1 / |b|)`, each (B,) in float64 for float64 rows and in
float32 otherwise, all three 0 where a row counts as zero; and
`backward(grad, a, b, c, 1 / |a|, 1 / |b|, (need a, need b)) -> gradients of a and b, None where not needed`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._native import missing as native_missing
from .._operator import with_backward

OP = Op(
    "cosine",
    ("pairwise_cosine",),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
        "native": Backend(f"{__package__}.native", native_missing),
    },
)


def cosine(a: Tensor, b: Tensor, eps: float, backend: str) -> Tensor:
    if torch.compiler.is_compiling():
        return _operator(a, b, eps, backend)[0]
    module = OP.select(a.device, backend)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Cosine.apply(a, b, eps, module)
    return _forward(a, b, eps, module)[0]


def _forward(a: Tensor, b: Tensor, eps: float, module: Any) -> tuple[Tensor, Tensor, Tensor]:
    return module.forward(a, b, eps) if a.numel() else _empty(a)


def _empty(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three (B,) results; rows of no columns are zero rows."""
    dtype = wide(a.dtype)
    c, inverse_a, inverse_b = (a.new_zeros(a.shape[0], dtype=dtype) for _ in range(3))
    return c, inverse_a, inverse_b


def _backward(grad: Tensor, saved: tuple[Tensor, ...], needs: tuple[bool, bool], module: Any):
    a = saved[0]
    if a.numel():
        return module.backward(grad.to(saved[2].dtype).contiguous(), *saved, needs)
    return tuple(torch.zeros_like(a) if need else None for need in needs)


class _Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, eps: float, module: Any) -> Tensor:
        result = _forward(a, b, eps, module)
        ctx.save_for_backward(a, b, *result)
        ctx.module = module
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        refuse_second_derivative("pairwise_cosine")
        return *_backward(grad, ctx.saved_tensors, ctx.needs_input_grad[:2], ctx.module), None, None


def _operator_backward(grad, a, b, eps, c, inverse_a, inverse_b, needs, module):
    return _backward(grad, (a, b, c, inverse_a, inverse_b), tuple(needs), module)


_operator = with_backward(
    OP, "cosine", "Tensor a, Tensor b, float eps", 3, _forward, lambda a, *_: _empty(a), _operator_backward, gradients=2
)
