"""pairwise_cosine on a CPU, with the compiled C++ kernels in csrc/cosine."""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .._native import FLOATS, address, module
from .problem import Problem
from .reference import Saved


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
    a, b, eps, dims = problem
    rows, columns = a.shape
    a, b = _rows(a), _rows(b)
    shape = (3, rows) if dims is None else (3, len(dims), rows)
    c, inverse_a, inverse_b = torch.empty(shape, dtype=a.dtype, device="cpu").unbind()
    module("cpu").cosine(
        address(a), address(b), rows, columns, a.stride(0), b.stride(0), FLOATS[a.dtype], eps,
        address(c), address(inverse_a), address(inverse_b), tuple(dims or (columns,)), torch.get_num_threads(),
    )  # fmt: skip
    return c, (c, inverse_a, inverse_b)


def backward(problem: Problem, saved: Saved, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    c, inverse_a, inverse_b = saved
    rows, columns = problem.a.shape
    a, b, upstream = _rows(problem.a), _rows(problem.b), upstream.contiguous()
    grads = [torch.empty(rows, columns, dtype=a.dtype, device="cpu") if need else None for need in needs]
    module("cpu").cosine_grad(
        address(upstream), address(a), address(b), rows, columns, a.stride(0), b.stride(0), FLOATS[a.dtype],
        address(c), address(inverse_a), address(inverse_b), *map(address, grads),
        tuple(problem.dims or (columns,)), torch.get_num_threads(),
    )  # fmt: skip
    return tuple(None if x is None else x.to(dtype) for x in grads)


def _rows(x: Tensor) -> Tensor:
    """Convert x to a form that the kernels read: float32 or float64 with contiguous rows. Any row stride is allowed."""
    if x.dtype != wide(x.dtype):
        return x.float().contiguous()
    return x if x.stride(1) == 1 else x.contiguous()
