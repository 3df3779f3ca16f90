"""Batches over all processes: three numbers a pair, or whole columns of embeddings."""

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
    sizes, _ = process_rows(similarity)
    if len(sizes) == 1:
        return similarity, score, label
    gathered = _GatherOwnGradient.apply(similarity, sizes)
    return gathered, _all_gather(score, sizes), None if label is None else _all_gather(label, sizes)


def process_rows(own: Tensor) -> tuple[list[int], int]:
    """How many rows each process has, in the order of ranks, and where `own`'s begin among them: ([B], 0) in a
    single process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own.shape[0]], 0
    rows = torch.tensor([own.shape[0]], device=own.device)
    sizes = [int(size) for size in _all_gather(rows, [1] * dist.get_world_size())]
    return sizes, sum(sizes[: dist.get_rank()])


def gather_rows(own: Tensor, sizes: list[int]) -> Tensor:
    """(B, ...) -> (sum of sizes, ...): the rows of every process in the order of ranks; `own` itself in a single
    process.

    The gradient that all processes have for a row goes to the one that it came from. Where each computes a loss of
    its own, times the number of processes and over the whole batch's count, DistributedDataParallel's average is
    exactly the gradient of one process with the whole batch.
    """
    return own if len(sizes) == 1 else _GatherEveryGradient.apply(own, sizes)


class _GatherOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int]) -> Tensor:
        rank = dist.get_rank()
        ctx.start, ctx.rows, ctx.world = sum(sizes[:rank]), sizes[rank], len(sizes)
        return _all_gather(own, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(0, ctx.start, ctx.rows) * ctx.world, None


class _GatherEveryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int]) -> Tensor:
        rank = dist.get_rank()
        ctx.start, ctx.rows = sum(sizes[:rank]), sizes[rank]
        return _all_gather(own, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Everybody's rows cross the wire, where reduce_scatter would send each process its own: gloo has none, and
        # NCCL's wants equal shares.
        everyone = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(everyone)
        return everyone.narrow(0, ctx.start, ctx.rows), None


def _all_gather(own: Tensor, sizes: list[int]) -> Tensor:
    # all_gather wants equal shapes; a last batch may be shorter on some processes.
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: own.shape[0]] = own.detach()
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)])
