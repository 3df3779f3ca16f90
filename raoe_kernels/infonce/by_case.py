"""What auto runs on CUDA: Triton's kernels where there are any for the call, and plain torch otherwise."""

from __future__ import annotations

from types import ModuleType

from . import scan, triton_kernels
from .problem import Problem


def serving(problem: Problem) -> ModuleType:
    """The module that serves a call."""
    return scan if problem.beyond_triton() else triton_kernels
