"""Compile every Triton kernel ahead of time, for a GPU that need not be there, and say what each costs.

`python -m raoe_kernels.triton_compile 80 90 100` prints a table. Nothing is launched. Triton must not be in
its interpreter (TRITON_INTERPRET unset), which is decided when it is first imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

OPS = ("pairwise", "cosine", "attention", "infonce", "sigmoid", "guided")  # those with Triton kernels


class Variant(NamedTuple):
    """One compilation: what Triton's launcher would ask for on the first call with such arguments.

    name        of the variant, as reports show it
    kernel      the jitted function
    signature   argument name: Triton type ("*fp32", "i64", "constexpr", …)
    constants   values of the constexpr arguments
    warps       per program
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int


class Compiled(NamedTuple):
    """seconds it took (next to none where Triton's cache had it), registers a thread, bytes a thread that spilled into
    local memory, bytes of shared memory, and the code: "ttgir" and "ptx" as text, "cubin" as bytes."""

    name: str
    arch: int
    seconds: float
    registers: int
    spilled: int
    shared: int
    code: dict[str, Any]


# Shared memory that one block may use, bytes: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def signature_of(kernel: Any, **pointers: str) -> dict[str, str]:
    """A kernel's signature: types of its pointers, its own annotations, constexprs, and 32-bit integers for
    the rest."""
    if not hasattr(kernel, "params"):
        raise RuntimeError("Triton was imported with TRITON_INTERPRET set: there is nothing to compile")
    annotated = {p.name: "constexpr" if p.is_constexpr else p.annotation_type for p in kernel.params}
    return {name: pointers.get(name) or kind or "i32" for name, kind in annotated.items()}


def variants() -> Iterator[Variant]:
    """Every compilation that calls of this package can cause."""
    for op in OPS:
        yield from import_module(f".{op}.triton_kernels", __package__).variants()


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile for compute capability `arch` (80, 90, 100), or find it in Triton's cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.kernel, variant.signature, constexprs=variant.constants)
    start = time.perf_counter()
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": variant.warps})
    seconds = time.perf_counter() - start
    code = {kind: kernel.asm[kind] for kind in ("ttgir", "ptx", "cubin")}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        (usage,) = resources(triton.knobs.nvidia.cuobjdump.path, file.name).values()
    return Compiled(variant.name, arch, seconds, *usage, kernel.metadata.shared, code)


def resources(cuobjdump: str, binary: str) -> dict[str, tuple[int, int]]:
    """Registers a thread and bytes of its local memory, of every kernel in a file, as NVIDIA's tool says."""
    said = subprocess.run([cuobjdump, "-res-usage", binary], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if not found:
        raise RuntimeError(f"no kernel's resources in what cuobjdump says of {binary}: {said!r}")
    return {name: (int(registers), int(stack) + int(local)) for name, registers, stack, local in found}


def report(arches: Iterable[int], chosen: str = "") -> Iterator[Compiled]:
    """Compile every variant whose name contains `chosen`, for every architecture."""
    for variant in variants():
        if chosen in variant.name:
            for arch in arches:
                yield compile_variant(variant, arch)


if __name__ == "__main__":
    print(f"{'kernel':44} {'sm':>4} {'seconds':>8} {'registers':>9} {'spilled B':>9} {'shared B':>9}")
    for row in report([int(arch) for arch in sys.argv[1:]] or [90]):
        print(
            f"{row.name:44} {row.arch:4} {row.seconds:8.1f} {row.registers:9} {row.spilled:9} {row.shared:9}",
            flush=True,
        )
