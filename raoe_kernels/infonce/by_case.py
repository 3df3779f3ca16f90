"""What auto runs on CUDA: Triton's kernels where there are any for the call, and plain torch otherwise."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .._problems import Gradients
from . import scan, triton_kernels
from .problem import Problem


def serving(problem: Problem) -> ModuleType:
    """The module that serves a call."""
    return scan if problem.beyond_triton() else triton_kernels


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    return serving(problem).forward(problem, needs)


def backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype
) -> Gradients:
    return serving(problem).backward(problem, saved, upstream, needs, dtype)
