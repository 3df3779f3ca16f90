"""Gather batches of equal size from all processes."""

from sentence_transformers.util.distributed import all_gather_with_grad, get_world_size
from torch import Tensor


def gather_rows(own: Tensor) -> Tensor:
    """Gather the rows of all processes in the order of ranks: (B, ...) -> (processes * B, ...).

    In the backward pass, the process that owns a row receives the sum of all processes' gradients
    of this row. If each process computes the mean loss of its own rows, or the same loss of all
    rows, DistributedDataParallel's average is exactly the gradient of the whole batch.
    """
    if get_world_size() == 1:
        return own
    # flat, because torch's backward pass mixes up the rows of a transposed gradient (with gloo)
    rows = all_gather_with_grad(own.flatten())
    return rows.view(get_world_size() * len(own), *own.shape[1:])
