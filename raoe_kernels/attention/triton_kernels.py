"""Bidirectional and dual attention in Triton: launch code for the kernels in triton_forward.py and triton_backward.py.

Padded and packed batches use the same kernels. A packed batch is treated as a single padded row in which a sequence
can begin at any position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from .._dtypes import flags, wide
from ..triton_rows import has_99_kib
from .padding import Options, Padding
from .triton_backward import attention_backward_kv, attention_backward_q, attention_backward_short
from .triton_forward import attention_forward, attention_spans

# {(bytes of the dtype or "tf32", head dimension rounded up to a power of two): entries for the forward, query and key
# kernels}. An entry lists the numbers of own rows (of the program's own tile), other rows (of the tiles that it loops
# over), warps and pipeline stages. A warp gets 16 own rows, the size of a tensor core instruction: more warps would
# compute the same products twice. Only full float32, which does not use tensor cores, can be split over any number of
# warps. In half precision and TF32, a tile has 64 own rows, the size of Hopper's instruction: more rows would be
# padding in most sentences. The accumulators (one, or two in the key kernel) and scores should fit into 255 registers
# per thread. So tiles of 128 columns have 32 other rows (or 128 keys on 8 warps); with 256 columns or in float64,
# accumulators and scores do not fit. The sizes give many rows and few register spills on sm_90; we did not compare
# their speed. The tiles for TF32 were never run on a GPU. Without SHORT_TILES, no size depends on lengths, so a
# sentence's result is bit-identical in any batch.
TILES: dict[tuple[int | str, int], tuple[tuple[int, int, int, int], ...]] = {
    (2, 64): ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    (2, 128): ((64, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    (2, 256): ((64, 32, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1)),
    (4, 64): ((32, 32, 4, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    (4, 128): ((16, 16, 4, 2), (16, 16, 4, 2), (32, 16, 8, 1)),
    (4, 256): ((16, 16, 4, 2), (16, 16, 8, 2), (16, 16, 8, 1)),
    ("tf32", 64): ((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2)),
    (8, 64): ((16, 16, 1, 2), (16, 16, 1, 2), (16, 16, 1, 2)),
    (8, 128): ((16, 16, 1, 2), (16, 16, 1, 2), (16, 16, 1, 1)),
    (8, 256): ((16, 16, 1, 1), (16, 16, 1, 1), (16, 16, 1, 1)),
}  # fmt: skip
# Numbers of rows in the tiles for calls whose longest sentence fits into one tile: with (16, 32), a call with
# max_seqlen 20 has tiles of up to 32 rows. If such a tile has at most ONE_KERNEL bytes, one backward kernel replaces
# two. For heads wider than SHORT_WIDTHS, these tiles and this kernel would spill registers. Both are off by default,
# because they were never run on a GPU.
SHORT_TILES: tuple[int, ...] = ()
ONE_KERNEL = 4096
SHORT_WIDTHS = 128, 64  # largest head dimension for these tiles, and for this backward kernel
SPANS_BLOCK, SPANS_WARPS = 1024, 4
ALIGN = 8  # elements; triton_forward.ALIGN as a number for host code
MODES = {(False,): 0, (True, False): 1, (True,): 2}  # Options.causal -> triton_forward's FULL, DUAL or CAUSAL
MAX_IN_99_KIB = 128  # largest head dimension for which the tiles of all dtypes fit into 99 KiB of shared memory
MAX_IN_TF32 = 64  # largest head dimension for TF32: with 128 columns, 64 rows spill up to 1,104 bytes per thread
KERNELS = (attention_forward, attention_backward_q, attention_backward_kv, attention_backward_short)


def _precision(q: Tensor) -> str:
    """Return how float32 matrix products are computed: "tf32" if torch's setting for matrix products allows it, else
    "ieee". Each launch reads the setting, as torch's own matrix products do."""
    # allow_tf32 is an older name of this setting. Reading it raises an error once fp32_precision has been set.
    allowed = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed and q.shape[-1] <= MAX_IN_TF32 else "ieee"


def _short(head_dim: int, longest: int) -> int:
    """Return the smallest number of rows in SHORT_TILES that the longest sentence fits into, or 0 if it fits into
    none."""
    fitting = (tile_rows for tile_rows in SHORT_TILES if longest <= tile_rows and head_dim <= SHORT_WIDTHS[0])
    return next(fitting, 0)


def _in_one_kernel(size: int, head_dim: int, longest: int) -> bool:
    """Return whether one kernel, attention_backward_short, computes all gradients. `size` is in bytes per element."""
    return head_dim <= SHORT_WIDTHS[1] and 0 < _short(head_dim, longest) * head_dim * size <= ONE_KERNEL


def _shape_class(size: int, precision: str, head_dim: int, longest: int, which: int) -> tuple[dict[str, Any], int]:
    """Return the compile-time constants and the number of warps for KERNELS[which]. `size` is in bytes per element."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    block, other, warps, stages = TILES["tf32" if precision == "tf32" else size, max(64, block_d)][min(which, 2)]
    if short := _short(head_dim, longest):
        block, other, stages = (short if which == 3 else min(block, short)), min(other, short), 1
        if size == 2 or precision == "tf32":
            warps = block // 16
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK": block, "OTHER": other, "STAGES": stages}
    return sizes | {"PRECISION": precision}, warps


def _aligned(x: Tensor) -> Tensor:
    """Return x if its rows are 16-byte aligned and its number of columns is a multiple of 8, else a copy padded with
    zeros.

    Extra columns of zeros do not change the scores or the other columns. Kernels for arbitrary strides would load
    elements one by one and keep the address of each element in registers, so that registers would spill.
    """
    if x.shape[-1] % ALIGN:
        return F.pad(x, (0, -x.shape[-1] % ALIGN))
    if x.stride(-1) == 1 and all(step % ALIGN == 0 for step in x.stride()[:-1]) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def spans(q: Tensor, padding: Padding) -> Padding:
    """Return `padding` with the spans that triton_forward.sequence reads. The forward and backward passes use the same
    spans."""
    if padding.spans is not None:
        return padding
    if padding.cu_seqlens is not None:
        return padding._replace(spans=padding.cu_seqlens.contiguous())
    batch, longest = q.shape[0], padding.longest
    if padding.mask is None:
        lengths = q.new_full((batch,), longest, dtype=torch.int32) if padding.lengths is None else padding.lengths.int()
        return padding._replace(spans=F.pad(lengths, (batch, 0)))
    flag_dtype = flags(q.dtype)
    mask = padding.mask.contiguous()
    mask = mask.to(flag_dtype) if flag_dtype.itemsize > 1 else mask.view(flag_dtype)
    result = mask.new_empty(3 * batch, dtype=torch.int32)
    with torch.cuda.device_of(q):
        attention_spans[(batch,)](mask, result, longest, BLOCK=SPANS_BLOCK, num_warps=SPANS_WARPS)
    return padding._replace(mask=mask, spans=result)


class _Call:
    """Arguments that all kernel launches of a call share: positions of sequences, sizes, and strides as in a padded
    batch."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options):
        padding = spans(q, padding)
        spans_tensor: Any = padding.spans
        self.packed = padding.cu_seqlens is not None
        q, k, v = self.inputs = _aligned(q), _aligned(k), _aligned(v)
        strides = [(0, x.stride(1), x.stride(0)) if self.packed else x.stride()[:3] for x in (q, k, v)]
        self.input_strides = [step // ALIGN for steps in strides for step in steps]
        self.heads, self.key_heads = q.shape[1], k.shape[1]
        self.longest = padding.longest
        self.kind = {"MODE": MODES[options.causal], "DROPOUT": int(options.seed is not None)}
        self.numbers = options.scale, int(options.dropout_p * 2**32), 1 - options.dropout_p
        self.row_len = 0 if self.packed else padding.longest
        self.sequences = len(spans_tensor) - 1 if self.packed else q.shape[0]
        # Kernels read `valid` only with a mask, and the seed only with dropout. Otherwise any tensor can be passed.
        valid = spans_tensor.view(flags(q.dtype)) if padding.mask is None else padding.mask
        self.positions = spans_tensor, valid, spans_tensor if options.seed is None else options.seed
        gap, tokens = (1, q.shape[0]) if self.packed else (self.sequences, 0)
        self.sizes = gap, self.sequences, tokens, int(padding.mask is not None)

    def launch(self, which: int, tensors: tuple[Tensor | None, ...]) -> None:
        q = self.inputs[0]
        constants, warps = _shape_class(q.dtype.itemsize, _precision(q), q.shape[-1], self.longest, which)
        tiles, heads = triton.cdiv(self.longest, constants["BLOCK"]), self.key_heads if which == 3 else self.heads
        with torch.cuda.device_of(q):
            KERNELS[which][(tiles * heads * (self.sequences + self.packed),)](
                *tensors, *self.sizes, self.row_len, self.longest, tiles, self.heads, self.heads // self.key_heads,
                *self.numbers, *self.input_strides, **self.kind, **constants, num_warps=warps,
            )  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options) -> tuple[Any, ...]:
    width, dual = q.shape[-1], len(options.causal) == 2
    if width > MAX_IN_99_KIB and has_99_kib(q.device):
        raise RuntimeError(
            f"backend 'triton' cannot run attention with head dimension {width} on this GPU: its 99 KiB of shared "
            f"memory per thread block limit the head dimension to {MAX_IN_99_KIB}; use backend='scan'"
        )
    call = _Call(q, k, v, padding, options)
    q = call.inputs[0]
    full, lse_full = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    causal, lse_causal = (torch.empty_like(full), torch.empty_like(lse_full)) if dual else (None, None)
    # Unless the call is dual, the kernel never writes to the causal arguments, so any tensor can be passed for them.
    outputs = (causal, full, lse_causal, lse_full) if dual else (full, full, lse_full, lse_full)
    call.launch(0, (*call.inputs, *outputs, *call.positions))
    return _narrow(causal, width), _narrow(full, width), lse_causal, lse_full


def _narrow(x: Tensor | None, width: int) -> Tensor | None:
    """Remove the columns of zeros that _aligned added."""
    return x if x is None or x.shape[-1] == width else x[..., :width].contiguous()


def backward(
    grad_causal: Tensor | None,
    grad_full: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Padding,
    options: Options,
    causal: Tensor | None,
    full: Tensor,
    lse_causal: Tensor | None,
    lse_full: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients. The query kernel always runs, because the key kernel reads its results."""
    dual, width = causal is not None, q.shape[-1]
    call = _Call(q, k, v, padding, options)
    q, k, v = call.inputs
    grad_full, full = _aligned(grad_full.contiguous()), _aligned(full)
    # Unless the call is dual, the kernels do not read the causal tensors, so any tensor can be passed for them.
    grad_causal = grad_full if grad_causal is None else _aligned(grad_causal.contiguous())
    causal, lse_causal = (full, lse_full) if causal is None else (_aligned(causal), lse_causal)
    grad_q, grad_k, grad_v = q.new_empty(q.shape), None, None
    lses = lse_causal, lse_full
    results = causal, full, *lses, *call.positions
    if _in_one_kernel(q.dtype.itemsize, q.shape[-1], padding.longest):
        grad_k, grad_v = k.new_empty(k.shape), k.new_empty(k.shape)
        call.launch(3, (*call.inputs, *results, grad_causal, grad_full, grad_q, grad_k, grad_v))
    else:
        # The query kernel writes delta and, in a dual call, the mixed tensors. The key kernel reads them.
        delta = torch.empty_like(lse_full)
        mixed = (torch.empty_like(full), torch.empty_like(delta), delta) if dual else (grad_full, delta, delta)
        call.launch(1, (*call.inputs, *results, grad_causal, grad_full, *mixed, grad_q))
        if needs[1] or needs[2]:
            # Compute one gradient per query head: a group's heads run in parallel. Then add them in a fixed order.
            grad_k, grad_v = q.new_empty(q.shape), q.new_empty(q.shape)
            call.launch(2, (*call.inputs, *lses, *call.positions, grad_full, *mixed, grad_k, grad_v))
            if call.heads > call.key_heads:
                grad_k, grad_v = (x.unflatten(1, (call.key_heads, -1)).sum(2) for x in (grad_k, grad_v))
    grads = zip((grad_q, grad_k, grad_v), needs, strict=True)
    dq, dk, dv = (_narrow(x, width) if need else None for x, need in grads)
    return dq, dk, dv
