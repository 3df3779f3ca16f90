"""Compile every Triton kernel ahead of time, without a GPU, and report the resources that each one uses.

`python -m benchmarks.triton_compile 80 90 100` prints a table. No kernel is launched. Leave TRITON_INTERPRET unset:
Triton reads it when it is first imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.triton_variants import Variant, variants


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
