"""A pytest plugin that puts the emulated CUDA module in the place of the native CPU module.

With it the kernels' own conformance suite tests csrc's CUDA code:

    RAOE_EMULATED_TILES=small pytest -p tests.cuda_emulator.plugin tests/kernels -k cpu-native
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from tests.cuda_emulator import emulate


class _AsCpuModule(ModuleType):
    """The CPU module's functions, by the emulated CUDA module's; the cosine, which has none, by the CPU module."""

    def __init__(self, cuda: ModuleType, cpu: ModuleType) -> None:
        super().__init__("raoe_kernels._native_cpu")
        self._cuda = cuda
        self.cosine, self.cosine_grad = cpu.cosine, cpu.cosine_grad

    def pairwise(self, *arguments) -> None:
        *arguments, _rows, _threads = arguments
        size = self._cuda.pairwise_workspace(*arguments)
        workspace = torch.full((size + 256,), 255, dtype=torch.uint8, device="cpu")  # NaN, and the largest integers
        start = -workspace.data_ptr() % 256
        self._cuda.pairwise(*arguments, workspace.data_ptr() + start, 0)
        # What lies behind the workspace is not ours.
        assert workspace[start + size :].eq(255).all() and workspace[:start].eq(255).all()


def pytest_configure(config) -> None:
    os.environ.pop("LD_PRELOAD", None)  # of tests/sanitizers, which is not to look at compilers
    folder = tempfile.mkdtemp(prefix="raoe_emulated_")
    small = os.environ.get("RAOE_EMULATED_TILES") == "small"
    sanitize = os.environ.get("RAOE_SANITIZE", "").split()
    cuda = emulate.build(Path(folder), emulate.SMALL_TILES if small else {}, sanitize=sanitize)
    cuda.schedule(int(os.environ.get("RAOE_EMULATED_ORDER", "0")), 3 if small else 132)
    name = "raoe_kernels._native_cpu"
    sys.modules[name] = _AsCpuModule(cuda, import_module(name))
    from raoe_kernels.pairwise import native, problem

    native.scaled = problem.scaled  # on a GPU torch does the scaling
