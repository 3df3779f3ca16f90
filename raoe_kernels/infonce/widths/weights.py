"""Weight the gradients of K losses, one loss per embedding width, by the upstream gradient, for all backends.

All widths share matrix products, so the loss weights (the upstream gradient) must be known before the gradients are
computed. On a CPU, the forward pass computes the gradients for equal loss weights. If the weights are not equal, the
backward pass repeats the computation. On a GPU, the backward pass always computes the gradients, because comparing the
weights would make the host wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._contract import Gradients, Needs
from ..._dtypes import wide
from ..problem import Problem

# (problem, weights (K,), needs) -> losses (K,), and the derivatives of sum(weights x losses) with respect to anchors,
# positives and negatives, in the losses' dtype, or None if not needed
Sweep = Callable[[Problem, Tensor, Needs], tuple[Tensor, Gradients]]


def with_weights(sweep: Sweep) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions `forward` and `backward` of a backend, built on its `sweep`."""

    def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
        anchors, dims = problem.anchors, problem.dims or ()
        needs = (False,) * len(needs) if anchors.is_cuda else needs
        losses, grads = sweep(problem, anchors.new_ones(len(dims), dtype=wide(anchors.dtype)), needs)
        return losses, grads if any(needs) else ()

    def backward(problem: Problem, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
        if saved and bool((upstream == upstream[0]).all()):
            grads: Any = [None if g is None else g * upstream[0] for g in saved]
        else:
            grads = sweep(problem, upstream, needs)[1]
        return *(None if g is None else g.to(dtype) for g in grads), None, None

    return forward, backward


def each_width(module: ModuleType) -> Sweep:
    """Return a `sweep` that calls `module`, a backend for a single width, once per width."""

    def sweep(problem: Problem, weights: Tensor, needs: Needs) -> tuple[Tensor, Gradients]:
        inputs = list(zip(problem.rows, needs, strict=False))
        sums = [x.new_zeros(x.shape, dtype=wide(x.dtype)) if need and x is not None else None for x, need in inputs]
        losses = []
        for width, weight in zip(problem.dims or (), weights.unbind(), strict=True):
            rows: Any = (None if x is None else x[:, :width] for x in problem.rows)
            prefix = problem._replace(**dict(zip(Problem._fields[:3], rows, strict=True)))
            loss, grads = module.forward(prefix, needs)
            losses.append(loss)
            if not any(needs):
                continue
            if hasattr(module, "backward"):
                grads = module.backward(prefix, grads, torch.ones_like(loss), needs, loss.dtype)
            for total, gradient in zip(sums, grads, strict=False):
                if total is not None:
                    total[:, :width] += weight * gradient
        return torch.stack(losses), tuple(sums)

    return sweep
