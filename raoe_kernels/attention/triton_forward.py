"""Triton forward kernel for attention, and the functions that it shares with the backward kernels.

A program computes the results of one tile of queries, for one head and one sequence. The program runs an online softmax
in base 2 over tiles of keys. The state of the softmax consists of the running maximum m of the scores, the sum l of the
weights 2^(score - m), and the weighted sum acc of the values. In a causal call, a program stops after the key tile that
contains the positions of its queries. A dual call returns the causal and the bidirectional result. In a dual call, a
program first processes the keys up to each query. The program then writes the causal result, and continues the same
softmax with the later keys, which gives the bidirectional result. So one softmax state is enough, and the scores of
every tile are computed only once.

Most tiles of keys need no mask and are called "clear". A tile needs a mask if it is on the diagonal or at the end of a
sequence, or if the sequence has holes (padding between real tokens). Positions are counted from a sequence's first real
token. So a sequence is split into the same tiles, in the same order, regardless of its place in a left-padded,
right-padded or packed batch.

The dropout mask is a hash of positions (see the README), so the backward kernels can compute the same mask again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rows import LOG2_E, kernel

# The launch code ensures that all rows begin at multiples of 16 bytes.
ALIGN = tl.constexpr(8)  # the unit of strides, in elements
# CLEAR: every token of the loop's tiles is real. EDGES: some tokens may be padding.
CLEAR, EDGES = tl.constexpr(True), tl.constexpr(False)
# MODE of a program: FULL writes a bidirectional result, CAUSAL writes a causal result to `full`, and DUAL writes both
# results.
FULL, DUAL, CAUSAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@kernel
def attention_spans(mask, spans, longest, BLOCK: tl.constexpr):
    """Compute the tensor `spans` [3, b], which `sequence` reads, from a mask [b, longest], with one program per row."""
    row, gap = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    first, end, count = longest, 0, 0
    for start in range(0, longest, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        real = tl.load(mask + row * longest + offset, offset < longest, 0) != 0
        first = tl.minimum(first, tl.min(tl.where(real, offset, longest)))
        end = tl.maximum(end, tl.max(tl.where(real, offset + 1, 0)))
        count += tl.sum(real.to(tl.int32))
    first = tl.minimum(first, end)
    tl.store(spans + row, first)
    tl.store(spans + gap + row, end)
    tl.store(spans + 2 * gap + row, (count < end - first).to(tl.int32))


@triton.jit
def sequence(spans, gap, batch, longest, masked):
    """Return the position of the first real token, the number of tokens from there to the last real token, and 1 if the
    sequence has holes, otherwise 0.

    In `spans`, the end of a sequence is stored `gap` elements after its start (gap is 1 for cu_seqlens). In a batch
    with a padding mask, a flag for holes is stored another `gap` elements later.
    """
    first = tl.load(spans + batch)
    length = tl.maximum(tl.minimum(tl.load(spans + gap + batch) - first, longest), 0)
    return first, length, tl.load(spans + 2 * gap + batch, masked != 0, 0)


@triton.jit
def places(start, first, length, valid, holes, row_len, BLOCK: tl.constexpr, WHICH: tl.constexpr = EDGES):
    """For each token in a tile, return its offset in the sequence, its position in the tensor, and whether it is real.

    In a padded batch with rows of row_len tokens, the tiles after the last real token cover the row's padding: first
    the padding on the right, then the padding before `first`. So every token is in a tile. For packed batches, row_len
    is 0.
    """
    offset = start + tl.arange(0, BLOCK)
    position = first + offset
    real = offset < length
    if WHICH == EDGES:
        position -= tl.where(position >= row_len, row_len, 0)
        real &= tl.load(valid + position, offset < length * holes, 1) != 0
    return offset, position, real


@triton.jit
def rows(
    x, position, row_mask, stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
    WHICH: tl.constexpr = EDGES,
):  # fmt: skip
    """Load a tile [BLOCK, BLOCK_D] of a tensor's rows. Padding rows are not read, and are 0 in the result."""
    column = tl.arange(0, BLOCK_D)
    at = x + position[:, None] * (stride * UNIT) + column[None, :]
    if WHICH == EDGES:
        return tl.load(at, row_mask[:, None] & (column < HEAD_DIM)[None, :], 0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(at, (column < HEAD_DIM)[None, :], 0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(x, position, row_mask, stride, value, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(x + position[:, None] * (stride * UNIT) + column[None, :], value.to(x.dtype.element_ty), mask)


@triton.jit
def zero_ends(
    x, row, spans, sequences, tokens, tile, tiles, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write zeros to the rows of x for the tokens before the first and after the last sequence of a packed batch. One
    call covers every `tiles`-th tile of these tokens, starting with tile number `tile`."""
    before = tl.load(spans)
    token_count = tl.load(spans + sequences) - before
    for start in range(tile * BLOCK, tokens - token_count, tiles * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        position = offset + tl.where(offset >= before, token_count, 0)
        zeros = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        store_rows(x, position * row, offset < tokens - token_count, 1, zeros, HEAD_DIM, BLOCK_D, HEAD_DIM)


@triton.jit
def result_strides(heads, row_len):
    """Return the strides between sequences, heads and tokens in a contiguous result, counted in rows (of HEAD_DIM
    elements). row_len is 0 for packed batches."""
    heads, row_len = heads.to(tl.int64), row_len.to(tl.int64)
    return heads * row_len, tl.maximum(row_len, 1), tl.where(row_len == 0, heads, 1)


@triton.jit
def begin(x, offset):
    """Return the pointer x + offset, marked as 16-byte aligned."""
    return tl.multiple_of(x + offset, 16)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a b. PRECISION selects how float32 matrices are multiplied: "ieee" (full precision) or "tf32"."""
    if INTERPRETED:  # the interpreter's tl.dot multiplies bfloat16 bits as if they were integers
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def product(a, b, wide: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b^T."""
    return dot(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), wide), PRECISION)


@triton.jit
def fold(key, number):
    """Mix the low 32 bits of a number into a 32-bit key, as reference._fold does."""
    x = key ^ (number.to(tl.uint32) * 0x9E3779B9)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stream(seed, head, batch, DROPOUT: tl.constexpr):
    """Return the key of the dropout hash for one head of a sequence."""
    key = tl.full((), 0, tl.uint32)
    if DROPOUT:
        number = tl.load(seed)
        key = fold(fold(fold(fold(key, number), number >> 32), head), batch)
    return key


@triton.jit
def drop(x, query_keys, key_offsets, threshold, DROPOUT: tl.constexpr):
    """Set a tile's elements to 0 where dropout drops them. `query_keys` holds fold(stream, offset) for each query."""
    if DROPOUT:
        x = tl.where(fold(query_keys, key_offsets) >= threshold.to(tl.uint32), x, 0.0)
    return x


@triton.jit
def step(
    scores, values, m, l, acc, query_keys, key_offsets, threshold, DROPOUT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add a tile of keys to the online softmax. A score of -inf has weight 0, even if all scores so far are -inf."""
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(scores - base[:, None])
    decay = tl.exp2(m - base)
    weights = drop(p, query_keys[:, None], key_offsets[None, :], threshold, DROPOUT)
    acc = dot(weights.to(values.dtype), values, acc * decay[:, None], PRECISION)
    return new_m, l * decay + tl.sum(p, 1), acc


@triton.jit
def _attend(
    queries, k, v, begin, end, first, length, valid, holes, row_len, k_row, v_row, factor, m, l, acc, query_keys,
    threshold, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WHICH: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the tiles of keys from begin to end."""
    wide: tl.constexpr = acc.dtype
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        other, place, real = places(start, first, length, valid, holes, row_len, BLOCK, WHICH)
        keys = rows(k, place, real, k_row, HEAD_DIM, BLOCK_D, ALIGN, WHICH)
        scores = product(queries, keys, wide, PRECISION) * factor
        if WHICH == EDGES:
            scores = tl.where(real[None, :], scores, float("-inf"))
        values = rows(v, place, real, v_row, HEAD_DIM, BLOCK_D, ALIGN, WHICH)
        m, l, acc = step(scores, values, m, l, acc, query_keys, other, threshold, DROPOUT, PRECISION)
    return m, l, acc


@kernel
def attention_forward(
    q, k, v, causal, full, lse_causal, lse_full, spans, valid, seed, gap, sequences, tokens, masked, row_len, longest,
    tiles, heads, group, scale: tl.float64, threshold: tl.int64, kept: tl.float64, q_batch: tl.int64, q_head: tl.int64,
    q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64,
    v_row: tl.int64, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute softmax(scale q k^T) v and the scores' logsumexp in base 2. In mode CAUSAL, a program stops at the
    diagonal. In mode DUAL, the program writes the causal result at the diagonal, and continues with the later keys.
    Each step multiplies BLOCK queries by OTHER keys, where OTHER divides BLOCK. With DROPOUT, weights whose hash is
    below `threshold` are dropped: they count only in the softmax's denominator. `kept` is 1 - dropout_p."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    out_batch, out_head, out_row = result_strides(heads, row_len)
    base = batch * out_batch + head * out_head
    full, causal = begin(full, base * HEAD_DIM), begin(causal, base * HEAD_DIM)
    if batch == sequences:
        zero_ends(full, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        if MODE == DUAL:
            zero_ends(causal, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        return
    first, length, holes = sequence(spans, gap, batch, longest, masked)
    valid += batch * row_len
    start = tile * BLOCK
    offset, position, real = places(start, first, length, valid, holes, row_len, BLOCK)
    store_mask = offset < tl.maximum(length, row_len)
    out = position * out_row
    lse_full, lse_causal = lse_full + base, lse_causal + base
    m = tl.full((BLOCK,), float("-inf"), wide)
    l = tl.zeros((BLOCK,), wide)
    acc = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        _finish(full, lse_full, out, store_mask, real, m, l, acc, HEAD_DIM, BLOCK_D)
        if MODE == DUAL:
            _finish(causal, lse_causal, out, store_mask, real, m, l, acc, HEAD_DIM, BLOCK_D)
        return
    q = begin(q, (batch * q_batch + head * q_head) * ALIGN)
    k = begin(k, (batch * k_batch + head // group * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + head // group * v_head) * ALIGN)
    queries = rows(q, position, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    query_keys = fold(stream(seed, head, batch, DROPOUT), offset)
    done = 0
    if MODE != FULL:
        clear = tl.where(holes != 0, 0, start)
        m, l, acc = _attend(
            queries, k, v, 0, clear, first, length, valid, holes, row_len, k_row, v_row, factor, m, l, acc,
            query_keys, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT, PRECISION, CLEAR,
        )  # fmt: skip
        m, l, acc = _attend(
            queries, k, v, clear, start, first, length, valid, holes, row_len, k_row, v_row, factor, m, l, acc,
            query_keys, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT, PRECISION, EDGES,
        )  # fmt: skip
        for at in tl.range(start, start + BLOCK, BLOCK, num_stages=STAGES):
            other, place, real_keys = places(at, first, length, valid, holes, row_len, BLOCK)
            keys = rows(k, place, real_keys, k_row, HEAD_DIM, BLOCK_D, ALIGN)
            scores = tl.where(real_keys[None, :], product(queries, keys, wide, PRECISION) * factor, float("-inf"))
            values = rows(v, place, real_keys, v_row, HEAD_DIM, BLOCK_D, ALIGN)
            later = other[None, :] > offset[:, None]
            m, l, acc = step(
                tl.where(later, float("-inf"), scores), values, m, l, acc, query_keys, other, threshold, DROPOUT,
                PRECISION,
            )  # fmt: skip
            if MODE == DUAL:
                _finish(causal, lse_causal, out, store_mask, real, m, l, acc, HEAD_DIM, BLOCK_D)
                later_scores = tl.where(later, scores, float("-inf"))
                m, l, acc = step(later_scores, values, m, l, acc, query_keys, other, threshold, DROPOUT, PRECISION)
        done = start + BLOCK
    if MODE != CAUSAL:
        clear = tl.where(holes != 0, 0, length // OTHER * OTHER)
        m, l, acc = _attend(
            queries, k, v, done, clear, first, length, valid, holes, row_len, k_row, v_row, factor, m, l, acc,
            query_keys, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT, PRECISION, CLEAR,
        )  # fmt: skip
        m, l, acc = _attend(
            queries, k, v, tl.maximum(done, clear), length, first, length, valid, holes, row_len, k_row, v_row, factor,
            m, l, acc, query_keys, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT, PRECISION, EDGES,
        )  # fmt: skip
    if DROPOUT:
        acc /= tl.full((), kept, wide)
    _finish(full, lse_full, out, store_mask, real, m, l, acc, HEAD_DIM, BLOCK_D)


@triton.jit
def _finish(result, lse, row, store_mask, real, m, l, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a tile of result rows and logsumexps, with zeros for padding."""
    l = tl.where(real, l, 1.0)
    value = tl.where(real[:, None], acc / l[:, None], 0.0)
    store_rows(result, row, store_mask, 1, value, HEAD_DIM, BLOCK_D, HEAD_DIM)
    tl.store(lse + row, tl.where(real, m + tl.log2(l), 0.0), store_mask)
