"""What the native CUDA module's machine code must show before it runs on a GPU. Needs the module and NVIDIA's tools that
Triton brings along, and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import raoe_kernels
from benchmarks import assembly, model
from raoe_kernels.triton_compile import resources

MODULES = list(Path(raoe_kernels.__file__).parent.glob("_native_cuda*.so"))
pytestmark = [
    pytest.mark.skipif(not MODULES, reason="the native CUDA module was not built here"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed, which brings cuobjdump"),
]
ARCHES = (80, 90, 100)


def kernels(arch: int) -> dict[str, tuple[int, int]]:
    """Registers and bytes of local memory a thread of each kernel of ours; those in double are for checks."""
    from triton import knobs

    found = resources(knobs.nvidia.cuobjdump.path, str(MODULES[0]), "-arch", f"sm_{arch}")
    return {name: used for name, used in found.items() if name.startswith("_ZN4raoe") and "Id" not in name}


@pytest.mark.parametrize("arch", ARCHES)
def test_nothing_spills(arch):
    found = kernels(arch)
    assert found and {name: used for name, used in found.items() if used[1]} == {}
