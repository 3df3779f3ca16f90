"""Pairwise losses computed by the compiled kernels in csrc/pairwise: C++ on the CPU, CUDA on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._native import FLOATS, address, module
from . import problem as _problem
from .problem import TIES, Problem, by_row

_WIDE = frozenset((torch.float32, torch.float64))
_KEYS = {torch.float32: 0, torch.float64: 1, torch.int64: 2}
_ONE_BLOCK = 1024  # up to this many pairs fit into one thread block on every GPU, and need no workspace
_TIES = {name: code for code, name in enumerate(TIES)}


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the losses and their gradients with respect to similarity. On a CPU, all K rows share one sort."""
    run = _by_row if problem.similarity.ndim == 2 and problem.similarity.device.type == "cuda" else _forward
    return run(problem, needs)


def _forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    similarity, scores, labels, rank, angle, scale, _, ties, rank_weight, angle_weight, parts = problem
    similarity, scores = similarity.contiguous(), scores.contiguous()
    labels = None if labels is None else labels.contiguous()
    device, dtype = similarity.device, similarity.dtype
    kind = device.type
    if dtype not in _WIDE and kind == "cpu":  # only the CUDA kernels read half precision
        similarity, dtype = similarity.float(), torch.float32
    *rows, size = similarity.shape
    shape = (2, *rows) if parts else rows
    result_dtype = dtype if dtype in _WIDE else torch.float32
    losses = torch.empty(shape, dtype=result_dtype, device=device)
    grads = torch.empty((*shape, size), dtype=result_dtype, device=device) if needs[0] else None
    arguments = (
        address(similarity), address(scores), address(labels), size, FLOATS[dtype], _KEYS[scores.dtype], _TIES[ties],
        rank, angle, parts, scale, problem.threshold, rank_weight, angle_weight, losses.data_ptr(), address(grads),
    )  # fmt: skip
    compiled = module(kind)
    if kind == "cpu":
        compiled.pairwise(*arguments, *(rows or (1,)), torch.get_num_threads())
        return losses, (grads,)
    with torch.cuda.device(device):
        bytes_needed = compiled.pairwise_workspace(*arguments) if size > _ONE_BLOCK else 0
        workspace = torch.empty(bytes_needed, dtype=torch.uint8, device=device) if bytes_needed else None
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        compiled.pairwise(*arguments, address(workspace), stream)
    return losses, (grads,)


_by_row = by_row(_forward)


def scaled(problem: Problem, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Multiply the gradients by the upstream gradient, as problem.scaled does, but in C++ if they are on a CPU.

    On a CPU, torch's multiplication has more overhead than the C++ function. With 2^15 or more pairs, torch also wakes
    OpenMP threads, which then occupy cores that the next forward pass needs.
    """
    (grads,) = saved
    if grads is None or grads.dtype != dtype or grads.device.type != "cpu":
        return _problem.scaled(problem, saved, upstream, needs, dtype)
    *rows, size = shape = grads.shape[1:] if problem.parts else grads.shape
    grad = torch.empty(shape, dtype=dtype, device="cpu")
    upstream = upstream.contiguous()  # an upstream gradient that comes from sum() has stride 0
    first = address(upstream)
    last = first + upstream.nbytes // 2 if problem.parts else first
    module("cpu").scale(
        grads.data_ptr(), size, FLOATS[dtype], 1 + problem.parts, *(rows or (1,)), first, last, grad.data_ptr()
    )
    return (grad,)
