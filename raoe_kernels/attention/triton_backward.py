"""Triton backward kernels for attention. Each kernel recomputes every tile of scores only once.

Let p = 2^(score - lse) be the attention weights, lse the logsumexp (in base 2) of a query's scores, o the output, g its
upstream gradient, and delta = <g, o> for each query. The gradients are ds = p (g v^T - delta) for the scores, dq =
scale ds k, dk = scale ds^T q and dv = p^T g. A dual call has a causal and a bidirectional (full) softmax. For a key
that belongs to both softmaxes, p_full = w p_causal, where w = 2^(lse_causal - lse_full) <= 1 is one number per query.
So one matrix product serves both softmaxes. Up to the diagonal, this product uses the mixed gradient w g_full +
g_causal, the mixed delta w delta_full + delta_causal, and the causal logsumexp. Beyond the diagonal, the product uses
the bidirectional gradient, delta and logsumexp. The query kernel runs first and stores the mixed values. Each kernel
loops over the clear tiles (without a mask) on both sides of the diagonal, then over the masked tiles. A tile is masked
if it is on the diagonal or may contain padding. On the diagonal, each element uses the values for its own side of the
diagonal. A short sentence has only one tile.

With a dropout mask M, o = M p v / (1 - dropout_p). So ds = p (M (g v^T) / (1 - dropout_p) - delta) and dv = (M p)^T g /
(1 - dropout_p). The kernels multiply delta by 1 - dropout_p, and at the end divide the gradients by 1 - dropout_p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rows import kernel
from .triton_forward import (
    ALIGN,
    CAUSAL,
    CLEAR,
    DUAL,
    FULL,
    LOG2_E,
    begin,
    dot,
    drop,
    fold,
    places,
    product,
    result_strides,
    rows,
    sequence,
    store_rows,
    stream,
    zero_ends,
)


@triton.jit
def _masked_tiles(start, begin, end, length, holes, BLOCK: tl.constexpr, OTHER: tl.constexpr, MODE: tl.constexpr):
    """Return (low, high, edge). Between the positions `begin` and `end`, the tiles from `low` to `high` (in steps of
    OTHER) and from `edge` to `end` need a mask. Tiles before `low` and from `high` to `edge` are clear."""
    low, high = begin, begin
    if MODE != FULL:
        low, high = start, tl.minimum(start + BLOCK, length)
    low = tl.where(holes != 0, begin, low)
    high = tl.where(holes != 0, end, high)
    return low, high, tl.maximum(high, end // OTHER * OTHER)


@triton.jit
def _masked_start(i, low, high, edge, OTHER: tl.constexpr):
    """Return the start of the i-th tile that needs a mask."""
    before = tl.cdiv(high - low, OTHER)
    return tl.where(i < before, low + i * OTHER, edge + (i - before) * OTHER)


@triton.jit
def _count_masked_tiles(low, high, edge, end, OTHER: tl.constexpr):
    return tl.cdiv(high - low, OTHER) + tl.cdiv(tl.maximum(end - edge, 0), OTHER)


@triton.jit
def _by_score(
    scores, grad, values, lse, delta, query_keys, key_offsets, threshold, DROPOUT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Return the gradient with respect to a tile of scores [queries, keys], which is 0 for a score of -inf."""
    by_weight = product(grad, values, delta.dtype, PRECISION)
    by_weight = drop(by_weight, query_keys[:, None], key_offsets[None, :], threshold, DROPOUT)
    return tl.exp2(scores - lse[:, None]) * (by_weight - delta[:, None])


@triton.jit
def _gradient_of_queries(
    queries, k, v, grad, lse, delta, start, end, first, length, valid, holes, row_len, k_row, v_row, factor, acc,
    query_keys, threshold, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `acc` plus the sum of ds k over the clear tiles of keys (those without a mask) from `start` to `end`."""
    wide: tl.constexpr = acc.dtype
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        other, place, real = places(at, first, length, valid, holes, row_len, BLOCK, CLEAR)
        keys = rows(k, place, real, k_row, HEAD_DIM, BLOCK_D, ALIGN, CLEAR)
        scores = product(queries, keys, wide, PRECISION) * factor
        values = rows(v, place, real, v_row, HEAD_DIM, BLOCK_D, ALIGN, CLEAR)
        ds = _by_score(scores, grad, values, lse, delta, query_keys, other, threshold, DROPOUT, PRECISION)
        acc = dot(ds.to(keys.dtype), keys, acc, PRECISION)
    return acc


@triton.jit
def _of_queries(
    full, causal, grad_full, grad_causal, lse_full, lse_causal, base, row, real, kept, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Return the upstream gradient, logsumexp and delta of the result `full` for a tile of queries, and then the
    gradient, logsumexp and delta for the keys up to the diagonal. In mode DUAL, the latter three are the mixed
    gradient, the causal logsumexp and the mixed delta. In the other modes, they equal the first three."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    at = base * HEAD_DIM
    grad = rows(begin(grad_full, at), row, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
    delta = tl.sum(grad.to(wide) * rows(begin(full, at), row, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide), 1)
    delta *= tl.full((), kept, wide)  # 1 without dropout
    lse = tl.load(lse_full + base + row, real, 0.0)
    mixed, lse_mixed, delta_up = grad, lse, delta
    if MODE == DUAL:
        by_causal = rows(begin(grad_causal, at), row, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide)
        lse_mixed = tl.load(lse_causal + base + row, real, 0.0)
        w = tl.exp2(lse_mixed - lse)
        result = rows(begin(causal, at), row, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide)
        delta_up = w * delta + tl.sum(by_causal * result, 1)
        mixed = (w[:, None] * grad.to(wide) + by_causal).to(grad.dtype)
    return grad, lse, delta, mixed, lse_mixed, delta_up


@kernel
def attention_backward_q(
    q, k, v, causal, full, lse_causal, lse_full, spans, valid, seed, grad_causal, grad_full, grad_mixed, delta_mixed,
    delta_full, grad_q, gap, sequences, tokens, masked, row_len, longest, tiles, heads, group, scale: tl.float64,
    threshold: tl.int64, kept: tl.float64, q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64,
    k_head: tl.int64, k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of queries. For attention_backward_kv, also store delta and, in mode DUAL, the
    mixed gradient and the mixed delta."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    out_batch, out_head, out_row = result_strides(heads, row_len)
    base = batch * out_batch + head * out_head
    grad_q = begin(grad_q, base * HEAD_DIM)
    if batch == sequences:
        zero_ends(grad_q, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        return
    first, length, holes = sequence(spans, gap, batch, longest, masked)
    valid += batch * row_len
    start = tile * BLOCK
    offset, position, real = places(start, first, length, valid, holes, row_len, BLOCK)
    store_mask = offset < tl.maximum(length, row_len)
    out = position * out_row
    grad_mixed = begin(grad_mixed, base * HEAD_DIM)
    acc = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        store_rows(grad_q, out, store_mask, 1, acc, HEAD_DIM, BLOCK_D, HEAD_DIM)
        return
    q = begin(q, (batch * q_batch + head * q_head) * ALIGN)
    k = begin(k, (batch * k_batch + head // group * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + head // group * v_head) * ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    gradient_scale = tl.full((), scale, wide) / tl.full((), kept, wide)
    grad, lse, delta, mixed, lse_mixed, delta_up = _of_queries(
        full, causal, grad_full, grad_causal, lse_full, lse_causal, base, out, real, kept, HEAD_DIM, BLOCK_D, MODE
    )  # fmt: skip
    tl.store(delta_full + base + out, delta, real)
    queries = rows(q, position, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
    query_keys = fold(stream(seed, head, batch, DROPOUT), offset)
    end = tl.minimum(start + BLOCK, length) if MODE == CAUSAL else length
    low, high, edge = _masked_tiles(start, 0, end, length, holes, BLOCK, OTHER, MODE)
    if MODE == DUAL:
        store_rows(grad_mixed, out, real, 1, mixed, HEAD_DIM, BLOCK_D, HEAD_DIM)
        tl.store(delta_mixed + base + out, delta_up, real)
    if MODE != FULL:
        acc = _gradient_of_queries(
            queries, k, v, mixed, lse_mixed, delta_up, 0, low, first, length, valid, holes, row_len, k_row, v_row,
            factor, acc, query_keys, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT, PRECISION,
        )  # fmt: skip
    if MODE != CAUSAL:
        acc = _gradient_of_queries(
            queries, k, v, grad, lse, delta, high, edge, first, length, valid, holes, row_len, k_row, v_row, factor,
            acc, query_keys, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT, PRECISION,
        )  # fmt: skip
    for i in tl.range(0, _count_masked_tiles(low, high, edge, end, OTHER), num_stages=1):
        at = _masked_start(i, low, high, edge, OTHER)
        other, place, real_keys = places(at, first, length, valid, holes, row_len, OTHER)
        keys = rows(k, place, real_keys, k_row, HEAD_DIM, BLOCK_D, ALIGN)
        values = rows(v, place, real_keys, v_row, HEAD_DIM, BLOCK_D, ALIGN)
        scores = tl.where(real_keys[None, :], product(queries, keys, wide, PRECISION) * factor, float("-inf"))
        later = other[None, :] > offset[:, None]
        late_scores = tl.where(later, scores, float("-inf"))
        if MODE != FULL:
            scores = tl.where(later, float("-inf"), scores)
        ds = _by_score(scores, mixed, values, lse_mixed, delta_up, query_keys, other, threshold, DROPOUT, PRECISION)
        if MODE == DUAL:
            ds += _by_score(late_scores, grad, values, lse, delta, query_keys, other, threshold, DROPOUT, PRECISION)
        acc = dot(ds.to(keys.dtype), keys, acc, PRECISION)
    acc = tl.where(real[:, None], acc * gradient_scale, 0.0)
    store_rows(grad_q, out, store_mask, 1, acc, HEAD_DIM, BLOCK_D, HEAD_DIM)


@triton.jit
def _by_weight(
    scores, values, grad, lse, delta, by_value, query_keys, key_offsets, threshold, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tile of scores [keys, queries] (0 for a score of -inf), and by_value + p^T g."""
    p = tl.exp2(scores - lse[None, :])
    weights = drop(p, query_keys[None, :], key_offsets[:, None], threshold, DROPOUT)
    by_value = dot(weights.to(grad.dtype), grad, by_value, PRECISION)
    by_weight = product(values, grad, delta.dtype, PRECISION)
    by_weight = drop(by_weight, query_keys[None, :], key_offsets[:, None], threshold, DROPOUT)
    return p * (by_weight - delta[None, :]), by_value


@triton.jit
def _by_masked_weight(
    scores, later, values, grad, mixed, lse, lse_mixed, delta, delta_up, by_value, query_keys, key_offsets, threshold,
    MODE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the results of _by_weight for a masked tile. For keys that are not `later` than the query, use the mixed
    values."""
    if MODE == DUAL:
        p = tl.exp2(scores - tl.where(later, lse[None, :], lse_mixed[None, :]))
        by_value = dot(tl.where(later, p, 0.0).to(grad.dtype), grad, by_value, PRECISION)
        by_value = dot(tl.where(later, 0.0, p).to(grad.dtype), mixed, by_value, PRECISION)
        late, early = product(values, grad, delta.dtype, PRECISION), product(values, mixed, delta.dtype, PRECISION)
        ds = p * (tl.where(later, late, early) - tl.where(later, delta[None, :], delta_up[None, :]))
    else:
        if MODE == CAUSAL:
            scores = tl.where(later, float("-inf"), scores)
        ds, by_value = _by_weight(
            scores, values, grad, lse, delta, by_value, query_keys, key_offsets, threshold, DROPOUT, PRECISION
        )  # fmt: skip
    return ds, by_value


@triton.jit
def _gradients_of_keys(
    q, keys, values, grads, lses, deltas, start, end, first, length, valid, holes, row_len, q_row, out_row, factor,
    by_key, by_value, key, key_offsets, threshold, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ds^T q to `by_key` and p^T g to `by_value`, over one head's clear tiles of queries from `start` to `end`."""
    wide: tl.constexpr = by_key.dtype
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        other, place, real = places(at, first, length, valid, holes, row_len, BLOCK, CLEAR)
        out = place * out_row
        queries = rows(q, place, real, q_row, HEAD_DIM, BLOCK_D, ALIGN, CLEAR)
        grad = rows(grads, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM, CLEAR)
        scores = product(keys, queries, wide, PRECISION) * factor
        lse, delta = tl.load(lses + out), tl.load(deltas + out)
        ds, by_value = _by_weight(
            scores, values, grad, lse, delta, by_value, fold(key, other), key_offsets, threshold, DROPOUT, PRECISION
        )  # fmt: skip
        by_key = dot(ds.to(keys.dtype), queries, by_key, PRECISION)
    return by_key, by_value


@kernel
def attention_backward_kv(
    q, k, v, lse_causal, lse_full, spans, valid, seed, grad_full, grad_mixed, delta_mixed, delta_full, grad_k, grad_v,
    gap, sequences, tokens, masked, row_len, longest, tiles, heads, group, scale: tl.float64, threshold: tl.int64,
    kept: tl.float64, q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what one query head contributes to the gradients of a tile of keys and values. The caller sums these
    contributions over the query heads that share a key head.

    No matrix product needs a padding mask: a padding query is a row of zeros with gradient 0, and the gradient of a
    padding key is set to 0 at the end.
    """
    wide: tl.constexpr = lse_full.dtype.element_ty
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    out_batch, out_head, out_row = result_strides(heads, row_len)
    base = batch * out_batch + head * out_head
    grad_k, grad_v = begin(grad_k, base * HEAD_DIM), begin(grad_v, base * HEAD_DIM)
    if batch == sequences:
        zero_ends(grad_k, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        zero_ends(grad_v, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        return
    first, length, holes = sequence(spans, gap, batch, longest, masked)
    valid += batch * row_len
    start = tile * BLOCK
    offset, position, real = places(start, first, length, valid, holes, row_len, BLOCK)
    store_mask = offset < tl.maximum(length, row_len)
    own = position * out_row
    by_key, by_value = tl.zeros((BLOCK, BLOCK_D), wide), tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        store_rows(grad_k, own, store_mask, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
        store_rows(grad_v, own, store_mask, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
        return
    q = begin(q, (batch * q_batch + head * q_head) * ALIGN)
    k = begin(k, (batch * k_batch + head // group * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + head // group * v_head) * ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    keys = rows(k, position, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
    values = rows(v, position, real, v_row, HEAD_DIM, BLOCK_D, ALIGN)
    key = stream(seed, head, batch, DROPOUT)
    first_query = start if MODE == CAUSAL else 0
    low, high, edge = _masked_tiles(start, first_query, length, length, holes, BLOCK, OTHER, MODE)
    grad_full, grad_mixed = begin(grad_full, base * HEAD_DIM), begin(grad_mixed, base * HEAD_DIM)
    lse_full, lse_causal = lse_full + base, lse_causal + base
    delta_full, delta_mixed = delta_full + base, delta_mixed + base
    grads, lses, deltas = grad_full, lse_full, delta_full  # of the queries from `high` on
    if MODE == DUAL:
        by_key, by_value = _gradients_of_keys(
            q, keys, values, grad_full, lse_full, delta_full, 0, low, first, length, valid, holes, row_len, q_row,
            out_row, factor, by_key, by_value, key, offset, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT,
            PRECISION,
        )  # fmt: skip
        grads, lses, deltas = grad_mixed, lse_causal, delta_mixed
    by_key, by_value = _gradients_of_keys(
        q, keys, values, grads, lses, deltas, high, edge, first, length, valid, holes, row_len, q_row, out_row, factor,
        by_key, by_value, key, offset, threshold, HEAD_DIM, BLOCK_D, OTHER, STAGES, DROPOUT, PRECISION,
    )  # fmt: skip
    for i in tl.range(0, _count_masked_tiles(low, high, edge, length, OTHER), num_stages=1):
        at = _masked_start(i, low, high, edge, OTHER)
        other, place, real_queries = places(at, first, length, valid, holes, row_len, OTHER)
        out = place * out_row
        queries = rows(q, place, real_queries, q_row, HEAD_DIM, BLOCK_D, ALIGN)
        grad = rows(grad_full, out, real_queries, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
        lse, delta = tl.load(lse_full + out, real_queries, 0.0), tl.load(delta_full + out, real_queries, 0.0)
        mixed, lse_mixed, delta_up = grad, lse, delta
        if MODE == DUAL:
            mixed = rows(grad_mixed, out, real_queries, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
            lse_mixed = tl.load(lse_causal + out, real_queries, 0.0)
            delta_up = tl.load(delta_mixed + out, real_queries, 0.0)
        ds, by_value = _by_masked_weight(
            product(keys, queries, wide, PRECISION) * factor, offset[:, None] > other[None, :], values, grad, mixed,
            lse, lse_mixed, delta, delta_up, by_value, fold(key, other), offset, threshold, MODE, DROPOUT, PRECISION,
        )  # fmt: skip
        by_key = dot(ds.to(keys.dtype), queries, by_key, PRECISION)
    gradient_scale = tl.full((), scale, wide) / tl.full((), kept, wide)
    if DROPOUT:
        by_value /= tl.full((), kept, wide)
    by_key = tl.where(real[:, None], by_key * gradient_scale, 0.0)
    by_value = tl.where(real[:, None], by_value, 0.0)
    store_rows(grad_k, own, store_mask, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
    store_rows(grad_v, own, store_mask, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)


@kernel
def attention_backward_short(
    q, k, v, causal, full, lse_causal, lse_full, spans, valid, seed, grad_causal, grad_full, grad_q, grad_k, grad_v,
    gap, sequences, tokens, masked, row_len, longest, tiles, heads, group, scale: tl.float64, threshold: tl.int64,
    kept: tl.float64, q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute all gradients for one key head and its query heads, in a sequence of at most BLOCK tokens."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    key_heads = heads // group
    key_head = tl.program_id(0) % key_heads
    batch = (tl.program_id(0) // key_heads).to(tl.int64)
    out_batch, out_head, out_row = result_strides(heads, row_len)
    own_batch, own_head, own_row = result_strides(key_heads, row_len)
    own_base = (batch * own_batch + key_head * own_head) * HEAD_DIM
    grad_k, grad_v = begin(grad_k, own_base), begin(grad_v, own_base)
    if batch == sequences:
        zero_ends(grad_k, own_row, spans, sequences, tokens, 0, 1, HEAD_DIM, BLOCK_D, BLOCK)
        zero_ends(grad_v, own_row, spans, sequences, tokens, 0, 1, HEAD_DIM, BLOCK_D, BLOCK)
        for i in range(group):
            of_head = begin(grad_q, (key_head * group + i) * out_head * HEAD_DIM)
            zero_ends(of_head, out_row, spans, sequences, tokens, 0, 1, HEAD_DIM, BLOCK_D, BLOCK)
        return
    first, length, holes = sequence(spans, gap, batch, longest, masked)
    offset, position, real = places(0, first, length, valid + batch * row_len, holes, row_len, BLOCK)
    store_mask = offset < tl.maximum(length, row_len)
    out = position * out_row
    k = begin(k, (batch * k_batch + key_head * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + key_head * v_head) * ALIGN)
    keys = rows(k, position, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
    values = rows(v, position, real, v_row, HEAD_DIM, BLOCK_D, ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    gradient_scale = tl.full((), scale, wide) / tl.full((), kept, wide)
    by_key, by_value = tl.zeros((BLOCK, BLOCK_D), wide), tl.zeros((BLOCK, BLOCK_D), wide)
    for i in range(group):
        head = key_head * group + i
        base = batch * out_batch + head * out_head
        grad, lse, delta, mixed, lse_mixed, delta_up = _of_queries(
            full, causal, grad_full, grad_causal, lse_full, lse_causal, base, out, real, kept, HEAD_DIM, BLOCK_D, MODE
        )  # fmt: skip
        of_head = begin(q, (batch * q_batch + head * q_head) * ALIGN)
        queries = rows(of_head, position, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
        # A padding key, whose weight could be inf, must not affect the gradient of the queries: 0 times inf is NaN.
        scores = tl.where(real[:, None], product(keys, queries, wide, PRECISION) * factor, float("-inf"))
        ds, by_value = _by_masked_weight(
            scores, offset[:, None] > offset[None, :], values, grad, mixed, lse, lse_mixed, delta, delta_up, by_value,
            fold(stream(seed, head, batch, DROPOUT), offset), offset, threshold, MODE, DROPOUT, PRECISION,
        )  # fmt: skip
        ds = ds.to(keys.dtype)
        by_key = dot(ds, queries, by_key, PRECISION)
        by_query = dot(tl.trans(ds), keys, tl.zeros((BLOCK, BLOCK_D), wide), PRECISION)
        by_query = tl.where(real[:, None], by_query * gradient_scale, 0.0)
        store_rows(begin(grad_q, base * HEAD_DIM), out, store_mask, 1, by_query, HEAD_DIM, BLOCK_D, HEAD_DIM)
    by_key = tl.where(real[:, None], by_key * gradient_scale, 0.0)
    by_value = tl.where(real[:, None], by_value / tl.full((), kept, wide), 0.0)
    store_rows(grad_k, position * own_row, store_mask, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
    store_rows(grad_v, position * own_row, store_mask, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
