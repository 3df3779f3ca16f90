"""Gather batches of equal size from all processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rows(own: Tensor) -> Tensor | None:
    """(B,) int64: indices of this process's rows among all processes' rows, in rank order; None for one process."""
    return None if world_size() == 1 else torch.arange(len(own), device=own.device) + dist.get_rank() * len(own)


def gather_rows(own: Tensor) -> Tensor:
    """Gather the rows of all processes in the order of ranks: (B, ...) -> (processes * B, ...).

    The gradients of all processes for a row are summed in the process to which the row belongs. If each process
    computes the mean loss of its own rows, or the same loss of all rows, DistributedDataParallel's average is exactly
    the gradient of the whole batch.
    """
    return own if world_size() == 1 else _GatherEveryGradient.apply(own)


def average_gradient(parameter: Tensor) -> Tensor:
    """Average the gradient of a loss's own parameter over processes, because DistributedDataParallel wraps only the
    encoder. Call this function once per forward pass, in every process."""
    return parameter if world_size() == 1 else gather_rows(parameter[None]).mean(0)


class _GatherEveryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        everyone = own.new_empty(world_size(), *own.shape)
        dist.all_gather(list(everyone.unbind()), own.contiguous())
        return everyone.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shares = list(gradient.clone(memory_format=torch.contiguous_format).chunk(world_size()))
        own = torch.empty_like(shares[0])
        dist.reduce_scatter(own, shares)
        return own
