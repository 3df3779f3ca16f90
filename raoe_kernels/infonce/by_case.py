"""Backend "auto" on CUDA: the Triton kernels if they support the call, otherwise plain torch."""

from __future__ import annotations

from types import ModuleType

from . import scan, triton_kernels
from .problem import Problem


def serving(problem: Problem) -> ModuleType:
    """Return the module that runs the call."""
    return scan if problem.beyond_triton() else triton_kernels
