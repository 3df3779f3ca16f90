"""The same losses by the compiled kernels: csrc/pairwise, C++ on the CPU and CUDA on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .._native import FLOATS, module
from .gradient import backward as scale
from .params import TIES, PairwiseParams

_WIDE = frozenset((torch.float32, torch.float64))
_KEYS = {torch.float32: 0, torch.float64: 1, torch.int64: 2}
_ONE_BLOCK = 1024  # pairs that one thread block takes without a workspace on every GPU
_TIES = {name: code for code, name in enumerate(TIES)}


def forward(
    similarity: Tensor, scores: Tensor, labels: Tensor | None, params: PairwiseParams, need_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses and their gradients by similarity, as autograd.py says; all inputs are contiguous and B >= 1."""
    rank, angle, tau, threshold, ties, rank_weight, angle_weight, parts = params
    kind, dtype = similarity.device.type, similarity.dtype
    wide = dtype in _WIDE
    if not wide and kind == "cpu":  # CUDA reads half precision itself
        similarity, dtype, wide = similarity.float(), torch.float32, True
    like = similarity if wide else similarity.new_empty(0, dtype=torch.float32)
    size, leading = similarity.shape[0], (2,) if parts else ()
    losses = like.new_empty(leading)
    grads = like.new_empty((*leading, size)) if need_grad else None
    arguments = (
        similarity.data_ptr(),
        scores.data_ptr(),
        0 if labels is None else labels.data_ptr(),
        size,
        FLOATS[dtype],
        _KEYS[scores.dtype],
        _TIES[ties],
        rank,
        angle,
        parts,
        tau,
        threshold,
        rank_weight,
        angle_weight,
        losses.data_ptr(),
        0 if grads is None else grads.data_ptr(),
    )
    compiled = module(kind)
    if kind == "cpu":
        compiled.pairwise(*arguments, torch.get_num_threads())
        return losses, grads
    with torch.cuda.device(similarity.device):
        needed = compiled.pairwise_workspace(*arguments) if size > _ONE_BLOCK else 0
        workspace = losses.new_empty(needed, dtype=torch.uint8) if needed else losses  # held until all is queued
        stream = torch._C._cuda_getCurrentRawStream(similarity.device.index)
        compiled.pairwise(*arguments, workspace.data_ptr(), stream)
    return losses, grads


# From here on torch would wake its OpenMP threads to multiply, and they spin on for a while after it: on the cores that
# the next forward wants.
_SHARED = 1 << 15


def backward(grads: Tensor, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """As gradient.py's."""
    if grads.numel() < _SHARED or grads.dtype != dtype or grads.device.type != "cpu":
        return scale(grads, upstream, dtype)
    grad = torch.empty_like(grads if len(upstream) == 1 else grads[0])
    first, last = upstream[0], upstream[-1]
    module("cpu").scale(
        grads.data_ptr(), grad.numel(), FLOATS[dtype], len(upstream), first.item(), last.item(), grad.data_ptr()
    )
    return grad
