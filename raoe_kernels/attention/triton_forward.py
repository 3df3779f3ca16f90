"""The forward kernel in Triton, and what it shares with the backward ones.

One program makes one tile of query rows of one head of one sequence, by an on-line softmax over tiles of keys in base
2: m the running maximum of the scores, l the sum of 2^(score - m), acc the same sum of values. A dual one takes the
keys up to each query first, writes the causal result, and goes on with the keys beyond: one state, never two.

Places are counted from a sequence's first real token, so that a sentence meets the same tiles in the same order
wherever it stands in a batch, padded left, right or packed.
"""

from __future__ import annotations

import triton
import triton.language as tl

POINTERS = [
    "q", "k", "v", "causal", "full", "lse_causal", "lse_full", "firsts", "ends", "valid",
    "grad_causal", "grad_full", "grad_mixed", "delta_mixed", "delta_full",
    "grad_q", "grad_k", "grad_v",
]  # fmt: skip
SCALARS = [
    "masked", "whole", "longest", "tiles", "heads", "group", "scale", "q_batch", "q_head", "q_row", "k_batch", "k_head",
    "k_row", "v_batch", "v_head", "v_row", "out_batch", "out_head", "out_row", "own_batch", "own_head", "own_row",
]  # fmt: skip
# All rows begin at multiples of 16 bytes (launches see to it), so Triton need not find out call by call.
kernel = triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)

ALIGN = tl.constexpr(8)  # strides come in units of as many elements
LOG2_E = tl.constexpr(1.4426950408889634)
# Which keys a pass takes: all, those up to the query, those beyond.
ALL, UP_TO, BEYOND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def sequence(firsts, ends, batch, longest):
    """First real token and number of tokens from there to the last real one."""
    first = tl.load(firsts + batch)
    return first, tl.maximum(tl.minimum(tl.load(ends + batch) - first, longest), 0)


@triton.jit
def places(start, first, length, valid, masked, whole, BLOCK: tl.constexpr):
    """Of a tile: offsets in the sequence, positions in the tensor, and which are real.

    In a padded batch of rows of `whole` tokens, the tiles after the last real token go on with the row's padding, first
    what stands behind it and then what stands before `first`: every token is some tile's. A packed one has whole = 0.
    """
    offset = start + tl.arange(0, BLOCK)
    position = first + offset
    position -= tl.where(position >= whole, whole, 0)
    real = offset < length
    real &= tl.load(valid + position, offset < length * masked, 1) != 0
    return offset, position, real


@triton.jit
def rows(x, position, inside, stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr):
    """[BLOCK, BLOCK_D] rows of a tensor, zeros where not inside: padding is never read."""
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(x + position[:, None] * (stride * UNIT) + column[None, :], mask, 0.0)


@triton.jit
def keep(x, position, inside, stride, value, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(x + position[:, None] * (stride * UNIT) + column[None, :], value.to(x.dtype.element_ty), mask)


@triton.jit
def begin(x, offset):
    """A pointer moved by offset elements, known to be at a multiple of 16 bytes."""
    return tl.multiple_of(x + offset, 16)


@triton.jit
def dot(a, b, acc, wide: tl.constexpr):
    """acc + a b, float32 without TF32."""
    if INTERPRETED:  # there tl.dot multiplies bfloat16's bits as if they were integers
        a = a.to(wide)
        b = b.to(wide)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=wide)


@triton.jit
def product(a, b, wide: tl.constexpr):
    """a b^T."""
    return dot(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), wide), wide)


@triton.jit
def step(scores, values, m, l, acc, wide: tl.constexpr):
    """One tile more of the on-line softmax. Scores of -inf weigh exactly 0, also while all were."""
    high = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(high == float("-inf"), 0.0, high)
    p = tl.exp2(scores - base[:, None])
    fade = tl.exp2(m - base)
    acc = dot(p.to(values.dtype), values, acc * fade[:, None], wide)
    return high, l * fade + tl.sum(p, 1), acc


@triton.jit
def seen(real, query, key, WHICH: tl.constexpr):
    """Keys that count for queries: the real ones, of those the ones up to the query (UP_TO) or later
    (BEYOND). real, of the keys, and both offsets lie along the dimensions of the tile: keys may be its rows too."""
    if WHICH == UP_TO:
        return real & (key <= query)
    elif WHICH == BEYOND:
        return real & (key > query)
    else:
        return real


@triton.jit
def _attend(
    queries, k, v, own, begin, end, first, length, valid, masked, whole, k_row, v_row, factor, m, l, acc,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WHICH: tl.constexpr,
):  # fmt: skip
    """The on-line softmax continued over the tiles of keys from begin to end."""
    wide: tl.constexpr = acc.dtype
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        other, place, real = places(start, first, length, valid, masked, whole, BLOCK)
        keys = rows(k, place, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
        count = seen(real[None, :], own[:, None], other[None, :], WHICH)
        scores = tl.where(count, product(queries, keys, wide) * factor, float("-inf"))
        m, l, acc = step(scores, rows(v, place, real, v_row, HEAD_DIM, BLOCK_D, ALIGN), m, l, acc, wide)
    return m, l, acc


@kernel
def attention_forward(
    q, k, v, causal, full, lse_causal, lse_full, firsts, ends, valid, masked, whole, longest, tiles, heads, group,
    scale: tl.float64, q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64,
    out_row: tl.int64, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr,
    DUAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q k^T) v and its logsumexp in base 2, causal too if DUAL: written where the pass crosses the
    diagonal. BLOCK queries meet OTHER keys at a time, a divisor of BLOCK."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    first, length = sequence(firsts, ends, batch, longest)
    valid += batch * whole
    start = tile * BLOCK
    offset, position, real = places(start, first, length, valid, masked, whole, BLOCK)
    mine = offset < tl.maximum(length, whole)
    base = batch * out_batch + head * out_head
    out = position * out_row
    full = begin(full, base * HEAD_DIM)
    causal = begin(causal, base * HEAD_DIM)
    lse_full += base
    lse_causal += base
    m = tl.full((BLOCK,), float("-inf"), wide)
    l = tl.zeros((BLOCK,), wide)
    acc = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        _finish(full, lse_full, out, mine, real, m, l, acc, HEAD_DIM, BLOCK_D)
        if DUAL:
            _finish(causal, lse_causal, out, mine, real, m, l, acc, HEAD_DIM, BLOCK_D)
        return
    q = begin(q, (batch * q_batch + head * q_head) * ALIGN)
    k = begin(k, (batch * k_batch + head // group * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + head // group * v_head) * ALIGN)
    queries = rows(q, position, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    if DUAL:
        m, l, acc = _attend(
            queries, k, v, offset, 0, tl.minimum(start + BLOCK, length), first, length, valid, masked, whole, k_row,
            v_row, factor, m, l, acc, HEAD_DIM, BLOCK_D, OTHER, STAGES, UP_TO,
        )  # fmt: skip
        _finish(causal, lse_causal, out, mine, real, m, l, acc, HEAD_DIM, BLOCK_D)
        m, l, acc = _attend(
            queries, k, v, offset, start, length, first, length, valid, masked, whole, k_row, v_row, factor, m, l, acc,
            HEAD_DIM, BLOCK_D, OTHER, STAGES, BEYOND,
        )  # fmt: skip
    else:
        m, l, acc = _attend(
            queries, k, v, offset, 0, length, first, length, valid, masked, whole, k_row, v_row, factor, m, l, acc,
            HEAD_DIM, BLOCK_D, OTHER, STAGES, ALL,
        )  # fmt: skip
    _finish(full, lse_full, out, mine, real, m, l, acc, HEAD_DIM, BLOCK_D)


@triton.jit
def _finish(result, lse, row, mine, real, m, l, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows and logsumexps, zeros for padding."""
    l = tl.where(real, l, 1.0)
    value = tl.where(real[:, None], acc / l[:, None], 0.0)
    keep(result, row, mine, 1, value, HEAD_DIM, BLOCK_D, HEAD_DIM)
    tl.store(lse + row, tl.where(real, m + tl.log2(l), 0.0), mine)
