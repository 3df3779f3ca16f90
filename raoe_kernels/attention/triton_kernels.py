"""Bidirectional and dual attention in Triton: the launches of triton_forward.py and triton_backward.py.

Padded and packed batches run through the same kernels: a packed one is the one row of a padded one in which sequences
begin anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from .._dtypes import flags, wide
from ..triton_compile import Variant, signature_of
from .padding import Padding
from .triton_backward import attention_backward_kv, attention_backward_q
from .triton_forward import POINTERS, attention_forward, attention_spans

# (bytes of the dtype, head dimension rounded up to a power of two) -> for the forward kernel, the one of queries and
# the one of keys: rows of the program's own tile, rows of the others it meets, warps, stages of the loop's pipeline.
# A warp has 16 own rows, what an instruction of the tensor cores takes: more warps would repeat each other's products.
# Only float32, multiplied without them, is shared by any number. In half precision own rows are 64, all that Hopper's
# instruction takes, and more would be padding in most sentences. Accumulators (one, for keys two) and scores have to
# fit 255 registers a thread, hence 32 others, or 128 keys, at 128 columns; at 256 they do not fit, nor in float64.
# Of those compiled, each is one with many rows that spills little on sm_90. Which is fastest was not measured.
# Tiles do not depend on lengths: that is why a sentence's result is the same to the bit in any batch.
TILES = {
    (2, 64): ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    (2, 128): ((64, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    (2, 256): ((64, 32, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1)),
    (4, 64): ((32, 32, 4, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    (4, 128): ((16, 16, 4, 2), (16, 16, 4, 2), (32, 32, 8, 1)),
    (4, 256): ((16, 16, 4, 2), (16, 16, 8, 2), (16, 16, 8, 1)),
    (8, 64): ((16, 16, 1, 2), (16, 16, 1, 2), (16, 16, 1, 2)),
    (8, 128): ((16, 16, 1, 2), (16, 16, 1, 2), (16, 16, 1, 1)),
    (8, 256): ((16, 16, 1, 1), (16, 16, 1, 1), (16, 16, 1, 1)),
}  # fmt: skip
SPANS_BLOCK, SPANS_WARPS = 1024, 4
ALIGN = 8  # elements; triton_forward.ALIGN, here for the host
KERNELS = (attention_forward, attention_backward_q, attention_backward_kv)


def _shape_class(dtype_bytes: int, head_dim: int, which: int) -> tuple[dict[str, int], int]:
    """Constants and warps of KERNELS[which]."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    block, other, warps, stages = TILES[dtype_bytes, max(64, block_d)][which]
    return {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK": block, "OTHER": other, "STAGES": stages}, warps


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows have a multiple of 8 columns, the added ones 0, and begin at multiples of 16 bytes.

    Columns of zeros change no score and no other column. Kernels that took any stride would load single numbers, each
    with an address in registers, and spill.
    """
    if x.shape[-1] % ALIGN:
        return F.pad(x, (0, -x.shape[-1] % ALIGN))
    if x.stride(-1) == 1 and all(step % ALIGN == 0 for step in x.stride()[:-1]) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def spans(q: Tensor, padding: Padding) -> Padding:
    """The same padding with its spans, as triton_forward.sequence reads them: once a call, for backward too."""
    if padding.spans is not None:
        return padding
    if padding.cu_seqlens is not None:
        return padding._replace(spans=padding.cu_seqlens.contiguous())
    batch, longest = q.shape[0], padding.longest
    if padding.mask is None:
        lengths = q.new_full((batch,), longest, dtype=torch.int32) if padding.lengths is None else padding.lengths.int()
        return padding._replace(spans=F.pad(lengths, (batch, 0)))
    kind = flags(q.dtype)
    mask = padding.mask.contiguous()
    mask = mask.to(kind) if kind.itemsize > 1 else mask.view(kind)
    found = mask.new_empty(3 * batch, dtype=torch.int32)
    with torch.cuda.device_of(q):
        attention_spans[(batch,)](mask, found, longest, BLOCK=SPANS_BLOCK, num_warps=SPANS_WARPS)
    return padding._replace(mask=mask, spans=found)


class _Call:
    """What all launches of a call share: where sequences lie, strides in the form of a padded batch, sizes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float):
        padding = spans(q, padding)
        found: Any = padding.spans
        self.packed = padding.cu_seqlens is not None
        q, k, v = self.inputs = _aligned(q), _aligned(k), _aligned(v)
        self.steps = [x // ALIGN for tensor in (q, k, v) for x in self.strides(tensor)]
        self.heads, self.key_heads = q.shape[1], k.shape[1]
        # Results are contiguous: their strides in rows of head_dim elements.
        self.out, self.own = self.row_strides(q.shape), self.row_strides(k.shape)
        self.longest, self.scale = padding.longest, scale
        self.whole = 0 if self.packed else padding.longest
        self.sequences = len(found) - 1 if self.packed else q.shape[0]
        # Without a mask its flags are not read: any tensor stands there.
        self.where = found, found.view(flags(q.dtype)) if padding.mask is None else padding.mask
        apart, tokens = (1, q.shape[0]) if self.packed else (self.sequences, 0)
        self.sizes = apart, self.sequences, tokens, int(padding.mask is not None)

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Between sequences, heads and tokens."""
        return (0, x.stride(1), x.stride(0)) if self.packed else (x.stride(0), x.stride(1), x.stride(2))

    def row_strides(self, shape: torch.Size) -> tuple[int, int, int]:
        return (0, 1, shape[1]) if self.packed else (shape[1] * shape[2], shape[2], 1)

    def launch(self, which: int, tensors: tuple[Tensor | None, ...], *more: int, dual: bool) -> None:
        q = self.inputs[0]
        constants, warps = _shape_class(q.dtype.itemsize, q.shape[-1], which)
        tiles = triton.cdiv(self.longest, constants["BLOCK"])
        heads = self.key_heads if which == 2 else self.heads
        with torch.cuda.device_of(q):
            KERNELS[which][(tiles * heads * (self.sequences + self.packed),)](
                *tensors, *self.sizes, self.whole, self.longest, tiles, heads, self.heads // self.key_heads, self.scale,
                *self.steps, *self.out, *more, DUAL=int(dual), **constants, num_warps=warps,
            )  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool) -> tuple[Any, ...]:
    call, width = _Call(q, k, v, padding, scale), q.shape[-1]
    q = call.inputs[0]
    full, lse_full = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    causal, lse_causal = (torch.empty_like(full), torch.empty_like(lse_full)) if dual else (None, None)
    # Without a causal part its arguments are not read: any tensor stands there.
    written = (causal, full, lse_causal, lse_full) if dual else (full, full, lse_full, lse_full)
    call.launch(0, (*call.inputs, *written, *call.where), dual=dual)
    return _columns(causal, width), _columns(full, width), lse_causal, lse_full


def _columns(x: Tensor | None, width: int) -> Tensor | None:
    """Without the columns that _aligned added."""
    return x if x is None or x.shape[-1] == width else x[..., :width].contiguous()


def backward(
    grad_causal: Tensor | None,
    grad_full: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Padding,
    scale: float,
    causal: Tensor | None,
    full: Tensor,
    lse_causal: Tensor | None,
    lse_full: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kernel of queries runs always: it makes what the one of keys needs."""
    dual, width = causal is not None, q.shape[-1]
    call = _Call(q, k, v, padding, scale)
    q, k, v = call.inputs
    grad_full = _aligned(grad_full.contiguous())
    grad_causal = grad_full if grad_causal is None else _aligned(grad_causal.contiguous())
    full, causal = _aligned(full), None if causal is None else _aligned(causal)
    grad_q, grad_k, grad_v = q.new_empty(q.shape), None, None
    # Scratch that the first kernel fills for the second.
    delta_full, delta_mixed, grad_mixed = torch.empty_like(lse_full), None, None
    if dual:
        delta_mixed, grad_mixed = torch.empty_like(lse_full), q.new_empty(q.shape)
    outputs = (causal, full) if dual else (full, full)
    lses = (lse_causal, lse_full) if dual else (lse_full, lse_full)
    made = (grad_mixed, delta_mixed, delta_full) if dual else (grad_full, delta_full, delta_full)
    call.launch(1, (*call.inputs, *outputs, *lses, *call.where, grad_causal, grad_full, *made, grad_q), dual=dual)
    if needs[1] or needs[2]:
        grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
        call.launch(2, (*call.inputs, *lses, *call.where, grad_full, *made, grad_k, grad_v), *call.own, dual=dual)
    found = zip((grad_q, grad_k, grad_v), needs, strict=True)
    dq, dk, dv = (_columns(x, width) if need else None for x, need in found)
    return dq, dk, dv


# Compiled ahead of time: every row of TILES, float16 once, and head dimensions that are smaller or no power of two.
_WIDTHS = ("bf16", "fp32", "fp64")
_HEAD_DIMS = {64: ("fp16", *_WIDTHS), 128: _WIDTHS, 256: _WIDTHS, 32: ("bf16", "fp32"), 80: ("bf16",)}


def variants() -> Iterator[Variant]:
    """What calls can cause, for triton_compile: a representative of each shape class."""
    sizes = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
    spans_of = signature_of(attention_spans, mask="*u8", spans="*i32")
    yield Variant("attention_spans", attention_spans, spans_of, {"BLOCK": SPANS_BLOCK}, SPANS_WARPS)
    for which, kernel in enumerate(KERNELS):
        for head_dim, dtypes in _HEAD_DIMS.items():
            for dtype in dtypes:
                exact, kind = ("*fp64", "*i32") if dtype == "fp64" else ("*fp32", "*u8")
                pointers = dict.fromkeys(POINTERS, f"*{dtype}") | {"spans": "*i32", "valid": kind}
                pointers |= dict.fromkeys(("lse_causal", "lse_full", "delta_mixed", "delta_full"), exact)
                for dual in (0, 1):
                    constants, warps = _shape_class(sizes[dtype], head_dim, which)
                    constants["DUAL"] = dual
                    name = f"{kernel.__name__} {dtype} {head_dim}{' dual' if dual else ''}"
                    yield Variant(name, kernel, signature_of(kernel, **pointers), constants, warps)
