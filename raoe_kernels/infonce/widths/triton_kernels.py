"""info_nce_loss of several widths on a GPU: each by the kernels of one width, whose pass over the logits costs less
there than scan's of all widths between shared products."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dtypes import wide
from ..._problems import Gradients
from .. import triton_kernels
from ..problem import Problem
from .reference import each_width


def forward(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """As autograd.py says."""
    return each_width(problem, dims, weights, needs, _one_width)


def _one_width(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    loss, saved = triton_kernels.forward(problem, needs)
    if not any(needs):
        return loss, ()
    return loss, triton_kernels.backward(problem, saved, torch.ones_like(loss), needs, wide(problem.anchors.dtype))
