"""Batches of pairs over all processes, three numbers a pair."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_pairs(
    similarity: Tensor, score: Tensor, label: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(B,) tensors of every process, concatenated in the order of ranks; the inputs themselves in a single
    process.

    Only `similarity` carries a gradient. Every process computes the same loss from what this returns, and
    each takes the gradient of its own similarities times the number of processes: DistributedDataParallel,
    which averages, then arrives at exactly the gradient of one process with the whole batch.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return similarity, score, label
    rows = similarity.new_tensor([similarity.shape[0]], dtype=torch.long)
    sizes = [int(size) for size in _all_gather(rows, [1] * dist.get_world_size())]
    gathered = _GatherOwnGradient.apply(similarity, sizes)
    return gathered, _all_gather(score, sizes), None if label is None else _all_gather(label, sizes)


class _GatherOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int]) -> Tensor:
        rank = dist.get_rank()
        ctx.start, ctx.rows, ctx.world = sum(sizes[:rank]), sizes[rank], len(sizes)
        return _all_gather(own, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(0, ctx.start, ctx.rows) * ctx.world, None


def _all_gather(own: Tensor, sizes: list[int]) -> Tensor:
    # all_gather wants equal shapes; a last batch may be shorter on some processes.
    padded = own.new_zeros(max(sizes))
    padded[: own.shape[0]] = own.detach()
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)])
