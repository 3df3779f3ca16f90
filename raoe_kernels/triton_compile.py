"""Compile every Triton kernel ahead of time, without a GPU, and report the resources that each one uses.

`python -m raoe_kernels.triton_compile 80 90 100` prints a table. No kernel is launched. Leave TRITON_INTERPRET unset:
Triton reads it when it is first imported.
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

OPS = ("pairwise", "cosine", "attention", "infonce", "sigmoid", "guided")  # ops with Triton kernels


class Variant(NamedTuple):
    """One compilation, as Triton's launcher requests it on the first call with such arguments.

    name        the variant's name in reports
    kernel      the jitted function
    signature   argument name: Triton type ("*fp32", "i64", "constexpr", …)
    constants   values of the constexpr arguments
    warps       number of warps per program
    stages      number of pipeline stages; the launcher's default is 3
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3


class Compiled(NamedTuple):
    """Compilation time in seconds (near 0 if cached), registers per thread, bytes per thread spilled to local memory,
    bytes of shared memory per block, and the code: "ttgir" and "ptx" as text, "cubin" as bytes."""

    name: str
    arch: int
    seconds: float
    registers: int
    spilled: int
    shared: int
    code: dict[str, Any]


# Bytes of shared memory that one block may use: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def signature_of(kernel: Any, **pointers: str) -> dict[str, str]:
    """Return a kernel's signature: types from `pointers`, else the kernel's annotations, else 32-bit integers."""
    if not hasattr(kernel, "params"):
        raise RuntimeError("Triton was imported with TRITON_INTERPRET set, so it cannot compile: unset the variable")
    annotated = {p.name: "constexpr" if p.is_constexpr else p.annotation_type for p in kernel.params}
    return {name: pointers.get(name) or kind or "i32" for name, kind in annotated.items()}


def variants() -> Iterator[Variant]:
    """Yield every compilation that a call to this package can cause."""
    for op in OPS:
        yield from import_module(f".{op}.triton_kernels", __package__).variants()


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile a variant for compute capability `arch` (90 is 9.0), or load it from Triton's cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.kernel, variant.signature, constexprs=variant.constants)
    start = time.perf_counter()
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    seconds = time.perf_counter() - start
    code = {kind: kernel.asm[kind] for kind in ("ttgir", "ptx", "cubin")}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        (usage,) = resources(triton.knobs.nvidia.cuobjdump.path, file.name).values()
    return Compiled(variant.name, arch, seconds, *usage, kernel.metadata.shared, code)


def resources(cuobjdump: str, binary: str) -> dict[str, tuple[int, int]]:
    """Return {kernel: (registers, bytes of local memory) per thread} for a binary, as cuobjdump reports them."""
    output = subprocess.run([cuobjdump, "-res-usage", binary], check=True, capture_output=True, text=True).stdout
    usage = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", output)
    if not usage:
        raise RuntimeError(f"cuobjdump reports no kernel in {binary}: {output!r}")
    return {name: (int(registers), int(stack) + int(local)) for name, registers, stack, local in usage}


def report(arches: Iterable[int], text: str = "") -> Iterator[Compiled]:
    """Compile every variant whose name contains `text`, for each architecture."""
    for variant in variants():
        if text in variant.name:
            for arch in arches:
                yield compile_variant(variant, arch)


if __name__ == "__main__":
    print(f"{'kernel':44} {'sm':>4} {'seconds':>8} {'registers':>9} {'spilled B':>9} {'shared B':>9}")
    for row in report([int(arch) for arch in sys.argv[1:]] or [90]):
        print(
            f"{row.name:44} {row.arch:4} {row.seconds:8.1f} {row.registers:9} {row.spilled:9} {row.shared:9}",
            flush=True,
        )
