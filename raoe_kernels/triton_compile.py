"""Compilations of the Triton kernels: what a call's launch requests from Triton's compiler, without a call.

`benchmarks/triton_compile.py` compiles them for GPUs that are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
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
