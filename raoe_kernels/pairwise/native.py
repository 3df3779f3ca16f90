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
    device, dtype = similarity.device, similarity.dtype
    kind = device.type
    if dtype not in _WIDE and kind == "cpu":  # CUDA reads half precision itself
        similarity, dtype = similarity.float(), torch.float32
    size, leading = similarity.shape[0], (2,) if parts else ()
    result = dtype if dtype in _WIDE else torch.float32
    losses = torch.empty(leading, dtype=result, device=device)
    grads = torch.empty((*leading, size), dtype=result, device=device) if need_grad else None
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
    with torch.cuda.device(device):
        room = compiled.pairwise_workspace(*arguments) if size > _ONE_BLOCK else 0
        workspace = torch.empty(room, dtype=torch.uint8, device=device) if room else None
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        compiled.pairwise(*arguments, 0 if workspace is None else workspace.data_ptr(), stream)
    return losses, grads


def backward(grads: Tensor, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """As gradient.py's.

    On a CPU torch's product takes more code than this one, and from 2^15 pairs on it wakes OpenMP threads, which then
    spin on the cores that the next forward wants.
    """
    if grads.dtype != dtype or grads.device.type != "cpu":
        return scale(grads, upstream, dtype)
    grad = torch.empty(grads.shape[-1], dtype=dtype)
    module("cpu").scale(
        grads.data_ptr(),
        grad.shape[0],
        FLOATS[dtype],
        len(upstream),
        upstream[0].data_ptr(),
        upstream[-1].data_ptr(),
        grad.data_ptr(),
    )
    return grad
