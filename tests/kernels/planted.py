"""Kernels that test_triton_compile.py's gates pass, or must not pass when they are launched otherwise."""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.triton_variants import Variant, signature_of


@triton.jit
def greedy(x, n, BLOCK: tl.constexpr):
    """Two arrays that stay in registers, where there are enough."""
    a = tl.load(x + tl.arange(0, BLOCK))
    b = tl.load(x + BLOCK + tl.arange(0, BLOCK))
    for _ in range(n):
        a, b = a * b + 1, a ^ (b >> 1)
    tl.store(x + tl.arange(0, BLOCK), a + b)


@triton.jit
def products(x, y, out, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """x y^T y, two products in a row as attention's, whose warps Triton puts one below the other."""
    row, depth = tl.arange(0, SIZE)[:, None], tl.arange(0, DEPTH)[None, :]
    b = tl.load(y + row * DEPTH + depth)
    inner = tl.dot(tl.load(x + row * DEPTH + depth), tl.trans(b))
    tl.store(out + row * DEPTH + depth, tl.dot(inner.to(b.dtype), b))


@triton.jit
def copy(x, out, n, stride, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        lane = tl.arange(0, BLOCK)
        if stride == 1:
            value = tl.load(tl.multiple_of(x + start, 16) + lane)
        else:
            value = tl.load(x + (start + lane) * stride)
        tl.store(tl.multiple_of(out + start, 16) + lane, value)


@triton.jit
def clipped(x, out, BY_A_NUMBER: tl.constexpr):
    value = tl.load(x + tl.arange(0, 128))
    limit = 0.999999 if BY_A_NUMBER else tl.full((), 0.999999, value.dtype)
    tl.store(out + tl.arange(0, 128), tl.minimum(value, limit))


def _variant(name: str, kernel, warps: int, constants: dict[str, int], **types: str) -> Variant:
    return Variant(name, kernel, signature_of(kernel, **types), constants, warps)


def variants() -> dict[str, Variant]:
    found = [_variant(f"greedy {block}", greedy, 1, {"BLOCK": block}, x="*i32") for block in (64, 4096)]
    half = dict.fromkeys(("x", "y"), "*bf16") | {"out": "*fp32"}
    for size, warps in ((64, 4), (64, 2), (64, 8), (32, 8), (32, 2)):
        constants = {"SIZE": size, "DEPTH": 64}
        found.append(_variant(f"products {size} by {warps} warps", products, warps, constants, **half))
    single = _variant("copy", copy, 4, {"BLOCK": 1024, "stride": 1}, x="*fp32", out="*fp32")
    found.append(single._replace(signature=single.signature | {"stride": "constexpr"}))
    found.append(_variant("copy strided", copy, 4, {"BLOCK": 1024}, x="*fp32", out="*fp32"))
    for name, number in (("clipped", False), ("clipped by a number", True)):
        found.append(_variant(name, clipped, 4, {"BY_A_NUMBER": number}, x="*fp64", out="*fp64"))
    return {variant.name: variant for variant in found}
