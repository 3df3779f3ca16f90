"""pairwise_cosine with the compiled kernels of csrc/cosine: C++ on the CPU, CUDA on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import wide
from .._native import FLOATS, address, module
from .reference import Dims


def forward(a: Tensor, b: Tensor, eps: float, dims: Dims = None) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = a.shape
    a, b = _rows(a), _rows(b)
    shape = (3, rows) if dims is None else (3, len(dims), rows)
    c, inverse_a, inverse_b = torch.empty(shape, dtype=wide(a.dtype), device=a.device).unbind()
    _call("cosine", a.device, dims or (columns,))(
        address(a), address(b), rows, columns, a.stride(0), b.stride(0), FLOATS[a.dtype], eps,
        address(c), address(inverse_a), address(inverse_b),
    )  # fmt: skip
    return c, inverse_a, inverse_b


def backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    needs: tuple[bool, bool],
    dims: Dims = None,
) -> tuple[Tensor | None, Tensor | None]:
    rows, columns = a.shape
    dtype = a.dtype
    a, b = _rows(a), _rows(b)
    grad_a, grad_b = (torch.empty(rows, columns, dtype=a.dtype, device=a.device) if need else None for need in needs)
    _call("cosine_grad", a.device, dims or (columns,))(
        address(grad), address(a), address(b), rows, columns, a.stride(0), b.stride(0), FLOATS[a.dtype],
        address(c), address(inverse_a), address(inverse_b), address(grad_a), address(grad_b),
    )  # fmt: skip
    return None if grad_a is None else grad_a.to(dtype), None if grad_b is None else grad_b.to(dtype)


def _rows(x: Tensor) -> Tensor:
    """Convert rows for the kernels: contiguous elements, any row stride, and no half precision on the CPU."""
    if x.device.type == "cpu" and x.dtype.itemsize == 2:
        return x.float().contiguous()
    return x if x.stride(1) == 1 else x.contiguous()


def _call(name: str, device: torch.device, dims: tuple[int, ...]):
    """Return the compiled function; it adds the arguments that depend on the device."""
    function = getattr(module(device.type), name)
    if device.type == "cpu":
        return lambda *arguments: function(*arguments, dims, torch.get_num_threads())

    def call(*arguments):
        with torch.cuda.device(device):
            function(*arguments, torch._C._cuda_getCurrentRawStream(device.index))  # current_stream() is slower

    return call
