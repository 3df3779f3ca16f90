"""Batches over all processes: three numbers a pair, or whole columns of embeddings."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Gather = bool | Literal["uneven"]  # what gather_across_devices may be; see raoe_train.losses


def gather_pairs(
    similarity: Tensor, score: Tensor, label: Tensor | None, *, uneven: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(B,) tensors of every process in the order of ranks; the inputs themselves in a single process.

    Only `similarity` carries a gradient. Every process computes the same loss of what this returns, and takes the
    gradient of its own similarities times the number of processes: DistributedDataParallel, which averages, then
    arrives at exactly the gradient of one process with the whole batch.
    """
    sizes, start = process_rows(similarity, uneven=uneven)
    if len(sizes) == 1:
        return similarity, score, label
    own, everyone = similarity.view_as(similarity), _all_gather(similarity, sizes)
    if own.requires_grad:
        own.register_hook(lambda gradient: gradient * len(sizes))
    gathered = torch.cat([everyone[:start], own, everyone[start + len(own) :]])
    return gathered, _all_gather(score, sizes), None if label is None else _all_gather(label, sizes)


def process_rows(own: Tensor, *, uneven: bool) -> tuple[list[int], int]:
    """How many rows each process has, in the order of ranks, and where `own`'s begin among them. As many as `own` has,
    unless `uneven`, where the processes tell each other."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own.shape[0]], 0
    sizes = [own.shape[0]] * dist.get_world_size()
    if uneven:
        # int() makes a GPU wait for its queue.
        rows = torch.tensor([own.shape[0]], device=own.device)
        sizes = [int(size) for size in _all_gather(rows, [1] * len(sizes))]
    return sizes, sum(sizes[: dist.get_rank()])


def gather_rows(own: Tensor, sizes: list[int]) -> Tensor:
    """(B, ...) -> (sum of sizes, ...): the rows of every process in the order of ranks.

    The gradient that all processes have for a row goes to the one that it came from. Where each computes a loss of
    its own, times the number of processes and over the whole batch's count, DistributedDataParallel's average is
    exactly the gradient of one process with the whole batch.
    """
    return own if len(sizes) == 1 else _GatherEveryGradient.apply(own, sizes)


class _GatherEveryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return _all_gather(own, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rank, sizes = dist.get_rank(), ctx.sizes
        everyone = gradient.clone(memory_format=torch.contiguous_format)
        if min(sizes) == max(sizes):
            own = torch.empty_like(everyone[: sizes[rank]])
            dist.reduce_scatter(own, list(everyone.split(sizes)))
            return own, None
        # reduce_scatter wants equal shares; this sends everybody's rows to every process, twice the bytes.
        dist.all_reduce(everyone)
        return everyone.narrow(0, sum(sizes[:rank]), sizes[rank]), None


def averaged(parameter: Tensor) -> Tensor:
    """A parameter of a loss's own, whose gradient becomes the mean over processes, since DistributedDataParallel is
    around the encoder alone. To be called once a forward, in every process."""
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    return parameter if alone else _AveragedGradient.apply(parameter)


class _AveragedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mean = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


def _all_gather(own: Tensor, sizes: list[int]) -> Tensor:
    # all_gather wants equal shapes, so shorter ones are padded.
    rows = max(sizes)
    padded = own.detach().contiguous()
    if len(own) < rows:
        padded = torch.cat([padded, padded.new_zeros(rows - len(own), *own.shape[1:])])
    everyone = padded.new_empty(len(sizes), *padded.shape)
    dist.all_gather(list(everyone.unbind()), padded)
    if min(sizes) == rows:
        return everyone.flatten(0, 1)
    return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)])
