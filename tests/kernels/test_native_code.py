"""What the native CUDA module's machine code must show before it runs on a GPU. Needs the module, NVIDIA's tools that
Triton brings along, and no GPU."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import raoe_kernels
from benchmarks import assembly
from benchmarks.assembly import Instruction
from raoe_kernels import _build

MODULES = list(Path(raoe_kernels.__file__).parent.glob("_native_cuda*.so"))
pytestmark = [
    pytest.mark.skipif(not MODULES, reason="the native CUDA module was not built here"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed, which brings cuobjdump"),
]


@cache
def kernels(arch: int) -> dict[str, list[Instruction]]:
    """The keys of the pairwise losses, except in double, which is for checks. (What the pairwise losses keep in
    registers is one of the ways through their other kernels.)"""
    found = assembly.sass(MODULES[0], "-arch", f"sm_{arch}")
    return {name: code for name, code in found.items() if re.search(r"_ZN4raoe.*\dprepareI(?!d)", name)}


def spilled(code: list[Instruction]) -> int:
    """Loads and stores of local memory."""
    return sum(one.name in ("LDL", "STL") for one in code)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_nothing_spills(arch):
    if arch not in (_build.info() or {})["modules"]["cuda"]["archs"]:
        pytest.skip(f"the module was not built for sm_{arch}")
    found = kernels(arch)
    assert found and {name: spilled(code) for name, code in found.items() if spilled(code)} == {}


GREEDY = """
__global__ void __launch_bounds__(1024) greedy(int* x, int n) {
  int held[COUNT];
  for (int k = 0; k < COUNT; ++k) held[k] = x[threadIdx.x + k * 1024];
  for (int i = 0; i < n; ++i) {
    for (int k = 0; k < COUNT; ++k) held[k] = held[k] * held[(k + 1) % COUNT] ^ i;
  }
  for (int k = 0; k < COUNT; ++k) x[threadIdx.x + k * 1024] = held[k];
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("count", "spills"), [(8, False), (100, True)])
def test_the_gate_sees_spills(count, spills, tmp_path):
    """A block of 1,024 threads leaves each 64 registers."""
    source, binary = tmp_path / "greedy.cu", tmp_path / "greedy.cubin"
    source.write_text(GREEDY)
    try:
        subprocess.run(["nvcc", f"-DCOUNT={count}", "-arch=sm_90", "-cubin", "-o", binary, source], check=True)
    except FileNotFoundError:
        pytest.skip("no nvcc")
    (code,) = assembly.sass(binary).values()
    assert (spilled(code) > 0) == spills
