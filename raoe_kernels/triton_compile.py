"""Compile every Triton kernel ahead of time, for a GPU that need not be there, and say what each costs.

`python -m raoe_kernels.triton_compile 80 90 100` prints a table. Nothing is launched. Triton must not be in
its interpreter (TRITON_INTERPRET unset), which is decided when it is first imported.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any, NamedTuple

OPS = ("pairwise", "cosine", "attention", "infonce", "guided")  # those with Triton kernels


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
    """seconds of compilation, registers a thread, bytes a thread spilled (stores + loads), bytes of shared
    memory."""

    name: str
    arch: int
    seconds: float
    registers: int
    spilled: int
    shared: int


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
    """Compile for compute capability `arch` (80, 90, 100), past Triton's cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.kernel, variant.signature, constexprs=variant.constants)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        start = time.perf_counter()
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": variant.warps})
        seconds = time.perf_counter() - start
    return Compiled(variant.name, arch, seconds, *resources(log.getvalue()), kernel.metadata.shared)


def resources(log: str) -> tuple[int, int]:
    """Registers a thread and bytes spilled, from what `ptxas -v` prints about one kernel."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if len(registers) != 1 or len(spills) != 1:
        raise RuntimeError(f"no resource usage of one kernel in ptxas' output: {log!r}")
    return int(registers[0]), sum(map(int, spills[0]))


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
