"""Gather batches of equal size from all processes: three numbers for each pair, or whole columns of embeddings."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rows(own: Tensor) -> Tensor | None:
    """(B,) int64: places of this process's rows among those of all, in the order of ranks. None in a single process."""
    return None if world_size() == 1 else torch.arange(len(own), device=own.device) + dist.get_rank() * len(own)


def gather_pairs(similarity: Tensor, score: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Concatenate the (B,) tensors of all processes by rank; a single process gets its inputs back.

    Only `similarity` has a gradient. Every process computes the same loss from the result. The gradient of a process's
    own similarities is multiplied by the number of processes; after the average of DistributedDataParallel it is
    exactly the gradient of one process with the whole batch.
    """
    if world_size() == 1:
        return similarity, score, label
    own, everyone = similarity.view_as(similarity), [*_all_gather(similarity).split(len(similarity))]
    everyone[dist.get_rank()] = own
    if own.requires_grad:
        own.register_hook(lambda gradient: gradient * world_size())
    return torch.cat(everyone), _all_gather(score), None if label is None else _all_gather(label)


def gather_rows(own: Tensor) -> Tensor:
    """(B, ...) -> (processes * B, ...): the rows of every process in the order of ranks.

    The gradients of all processes for a row are summed in the process that the row came from. If each process computes
    the mean loss of its own rows, DistributedDataParallel's average is exactly the gradient of the whole batch.
    """
    return own if world_size() == 1 else _GatherEveryGradient.apply(own)


class _GatherEveryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return _all_gather(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shares = list(gradient.clone(memory_format=torch.contiguous_format).chunk(world_size()))
        own = torch.empty_like(shares[0])
        dist.reduce_scatter(own, shares)
        return own


def average_gradient(parameter: Tensor) -> Tensor:
    """Average the gradient of a loss's own parameter over processes, because DistributedDataParallel wraps only the
    encoder. Call it once in a forward, in every process."""
    own = parameter.view_as(parameter)
    if world_size() > 1 and own.requires_grad:
        own.register_hook(lambda gradient: _all_gather(gradient[None]).mean(0))
    return own


def _all_gather(own: Tensor) -> Tensor:
    everyone = own.new_empty(world_size(), *own.shape)
    dist.all_gather(list(everyone.unbind()), own.detach().contiguous())
    return everyone.flatten(0, 1)
