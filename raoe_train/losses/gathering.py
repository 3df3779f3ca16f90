"""Gather batches of equal size from all processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Return the number of processes, 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rows(own: Tensor) -> Tensor | None:
    """Return (B,) int64 indices of this process's rows among the rows of all processes; None for one process."""
    return None if world_size() == 1 else torch.arange(len(own), device=own.device) + dist.get_rank() * len(own)


def gather_rows(own: Tensor) -> Tensor:
    """Gather the rows of all processes in the order of ranks: (B, ...) -> (processes * B, ...).

    In the backward pass, the process that owns a row receives the sum of all processes' gradients of this row. If each
    process computes the mean loss of its own rows, or the same loss of all rows, DistributedDataParallel's average is
    exactly the gradient of the whole batch.
    """
    return own if world_size() == 1 else _GatherEveryGradient.apply(own)


def average_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter of the loss whose gradient the backward pass averages over processes. DistributedDataParallel
    averages only gradients of the encoder. All processes must call this function equally often."""
    return parameter if world_size() == 1 else gather_rows(parameter[None]).mean(0)


def share_parameter(parameter: Tensor) -> None:
    """Copy a parameter of the loss from rank 0 to all processes, and average its gradient after each backward pass."""

    def average(shared: Any) -> None:
        dist.all_reduce(shared.grad)
        shared.grad /= world_size()

    dist.broadcast(parameter.detach(), 0)
    parameter.register_post_accumulate_grad_hook(average)


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
