"""pairwise_cosine as a differentiable function, eager and under torch.compile.

A backend has two functions. `forward(a, b, eps)` returns (c, 1 / |a|, 1 / |b|), each (B,), float64
for float64 rows, otherwise float32; all three are 0 where a row counts as zero. `backward(grad, a,
b, c, 1 / |a|, 1 / |b|, (need a, need b))` returns the gradients of a and b, None if not needed.
The backends of WIDTHS take `dims` as an additional last argument, and (B,) becomes (K, B).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _widths
from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._native import missing as native_missing
from .._operator import eager, with_backward

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

WIDTHS = Op(
    "pairwise_cosine of several widths",
    (),
    {
        "reference": OP.backends["reference"],
        "scan": OP.backends["scan"],
        "triton": OP.backends["triton"],
        "native": Backend(f"{__package__}.native", _widths.native_missing),
    },
)


def cosine(a: Tensor, b: Tensor, eps: float, dims: tuple, backend: str) -> Tensor:
    """Return (B,) similarities if dims is (), or (K, B) if it is a tuple that holds the K widths."""
    op, operator = (WIDTHS, _widths_operator) if dims else (OP, _operator)
    module = eager(op, backend, a, b)
    if module is None:
        return operator(a, b, eps, *dims, backend)[0]
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Cosine.apply(a, b, eps, dims, module)
    return _forward(a, b, eps, *dims, module)[0]


def _forward(a: Tensor, b: Tensor, eps: float, *dims_and_module: Any) -> tuple[Tensor, Tensor, Tensor]:
    *dims, module = dims_and_module
    return module.forward(a, b, eps, *map(tuple, dims)) if a.numel() else _empty(a, b, eps, *dims)


def _empty(a: Tensor, b: Tensor, eps: float, *dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Three results of zeros, (B,) or (K, B): the results of rows without columns."""
    shape = *map(len, dims), a.shape[0]
    c, inverse_a, inverse_b = (a.new_zeros(shape, dtype=wide(a.dtype)) for _ in range(3))
    return c, inverse_a, inverse_b


def _backward(grad: Tensor, saved: tuple[Tensor, ...], needs: tuple[bool, bool], dims: Any, module: Any):
    a = saved[0]
    if a.numel():
        return module.backward(grad.to(saved[2].dtype).contiguous(), *saved, needs, *map(tuple, dims))
    return tuple(torch.zeros_like(a) if need else None for need in needs)


class _Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, eps: float, dims: tuple, module: Any) -> Tensor:
        result = _forward(a, b, eps, *dims, module)
        ctx.save_for_backward(a, b, *result)
        ctx.dims, ctx.module = dims, module
        return result[0].clone()  # the caller may change it in place, and backward needs the original

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        refuse_second_derivative("pairwise_cosine")
        return *_backward(grad, ctx.saved_tensors, ctx.needs_input_grad[:2], ctx.dims, ctx.module), None, None, None


def _operator_backward(grad, a, b, eps, *rest):
    *dims, c, inverse_a, inverse_b, needs, module = rest
    return _backward(grad, (a, b, c, inverse_a, inverse_b), tuple(needs), dims, module)


def _register(op: Op, name: str, more: str = "") -> Any:
    arguments = "Tensor a, Tensor b, float eps" + more
    return with_backward(op, name, arguments, 3, _forward, _empty, _operator_backward, gradients=2)


_operator = _register(OP, "cosine")
_widths_operator = _register(WIDTHS, "cosine_widths", ", int[] dims")
