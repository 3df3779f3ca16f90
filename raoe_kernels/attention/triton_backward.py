"""Triton backward kernels of attention. One recomputed tile of scores serves both softmaxes.

With p = 2^(score - lse), o the output and g its gradient: ds = p (g v - g o), dq = scale ds k, dk = scale ds^T q,
dv = p^T g. If a query sees a key in both softmaxes, p_full = w p_causal with w = 2^(lse_causal - lse_full) <= 1, one
number per row. So both contributions combine into one: up to the diagonal it uses the mixed gradient
w g_full + g_causal, the delta (g o) mixed in the same way, and the causal logsumexp; beyond the diagonal it uses the
full ones. The query kernel runs first and stores the mixed values. Each kernel loops over the clear tiles on either
side of the diagonal, and then over the rest: tiles on the diagonal, where each element uses its own side, and edges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rows import kernel
from .triton_forward import (
    ALIGN,
    CLEAR,
    LOG2_E,
    begin,
    blank,
    dot,
    keep,
    places,
    product,
    rows,
    sequence,
)


@triton.jit
def _rest(start, length, holes, BLOCK: tl.constexpr, OTHER: tl.constexpr, DUAL: tl.constexpr):
    """Range of the tiles that need a mask: from `low` to `high` in steps of OTHER, and from `edge` to the sequence's
    end. The tiles before `low` and from `high` to `edge` are clear."""
    low, high = 0, 0
    if DUAL:
        low, high = start, tl.minimum(start + BLOCK, length)
    low = tl.where(holes != 0, 0, low)
    high = tl.where(holes != 0, length, high)
    return low, high, tl.maximum(high, length // OTHER * OTHER)


@triton.jit
def _nth(i, low, high, edge, OTHER: tl.constexpr):
    """Start of the i-th tile that needs a mask."""
    before = tl.cdiv(high - low, OTHER)
    return tl.where(i < before, low + i * OTHER, edge + (i - before) * OTHER)


@triton.jit
def _count(low, high, edge, length, OTHER: tl.constexpr):
    return tl.cdiv(high - low, OTHER) + tl.cdiv(tl.maximum(length - edge, 0), OTHER)


@triton.jit
def _by_score(scores, grad, values, lse, delta, wide: tl.constexpr):
    """Gradient of a tile of scores with one row per query; a score of -inf gets 0."""
    return tl.exp2(scores - lse[:, None]) * (product(grad, values, wide) - delta[:, None])


@triton.jit
def _gradient_of_queries(
    queries, k, v, grad, lse, delta, start, end, first, length, valid, holes, whole, k_row, v_row, factor, acc,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return acc + ds k over the clear tiles of keys from start to end."""
    wide: tl.constexpr = acc.dtype
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        _, place, real = places(at, first, length, valid, holes, whole, BLOCK, CLEAR)
        keys = rows(k, place, real, k_row, HEAD_DIM, BLOCK_D, ALIGN, CLEAR)
        scores = product(queries, keys, wide) * factor
        values = rows(v, place, real, v_row, HEAD_DIM, BLOCK_D, ALIGN, CLEAR)
        acc = dot(_by_score(scores, grad, values, lse, delta, wide).to(keys.dtype), keys, acc, wide)
    return acc


@kernel
def attention_backward_q(
    q, k, v, causal, full, lse_causal, lse_full, spans, valid, grad_causal, grad_full, grad_mixed, delta_mixed,
    delta_full, grad_q, gap, sequences, tokens, masked, whole, longest, tiles, heads, group, scale: tl.float64,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, DUAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries. Also stores delta = g o and, if DUAL, the mixed gradient for
    attention_backward_kv."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    dtype: tl.constexpr = q.dtype.element_ty
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    base = batch * out_batch + head * out_head
    grad_q = begin(grad_q, base * HEAD_DIM)
    if batch == sequences:
        blank(grad_q, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        return
    first, length, holes = sequence(spans, gap, batch, longest, masked)
    valid += batch * whole
    start = tile * BLOCK
    offset, position, real = places(start, first, length, valid, holes, whole, BLOCK)
    mine = offset < tl.maximum(length, whole)
    out = position * out_row
    full = begin(full, base * HEAD_DIM)
    causal = begin(causal, base * HEAD_DIM)
    grad_full = begin(grad_full, base * HEAD_DIM)
    grad_causal = begin(grad_causal, base * HEAD_DIM)
    grad_mixed = begin(grad_mixed, base * HEAD_DIM)
    acc = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        keep(grad_q, out, mine, 1, acc, HEAD_DIM, BLOCK_D, HEAD_DIM)
        return
    q = begin(q, (batch * q_batch + head * q_head) * ALIGN)
    k = begin(k, (batch * k_batch + head // group * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + head // group * v_head) * ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    grad = rows(grad_full, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
    delta = tl.sum(grad.to(wide) * rows(full, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide), 1)
    lse = tl.load(lse_full + base + out, real, 0.0)
    tl.store(delta_full + base + out, delta, real)
    queries = rows(q, position, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
    mixed, lse_mixed, delta_up = grad, lse, delta
    low, high, edge = _rest(start, length, holes, BLOCK, OTHER, DUAL)
    if DUAL:
        by_causal = rows(grad_causal, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide)
        lse_mixed = tl.load(lse_causal + base + out, real, 0.0)
        w = tl.exp2(lse_mixed - lse)
        result = rows(causal, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide)
        delta_up = w * delta + tl.sum(by_causal * result, 1)
        mixed = (w[:, None] * grad.to(wide) + by_causal).to(dtype)
        keep(grad_mixed, out, real, 1, mixed, HEAD_DIM, BLOCK_D, HEAD_DIM)
        tl.store(delta_mixed + base + out, delta_up, real)
        acc = _gradient_of_queries(
            queries, k, v, mixed, lse_mixed, delta_up, 0, low, first, length, valid, holes, whole, k_row, v_row, factor,
            acc, HEAD_DIM, BLOCK_D, OTHER, STAGES,
        )  # fmt: skip
    acc = _gradient_of_queries(
        queries, k, v, grad, lse, delta, high, edge, first, length, valid, holes, whole, k_row, v_row, factor, acc,
        HEAD_DIM, BLOCK_D, OTHER, STAGES,
    )  # fmt: skip
    for i in tl.range(0, _count(low, high, edge, length, OTHER), num_stages=1):
        other, place, there = places(_nth(i, low, high, edge, OTHER), first, length, valid, holes, whole, OTHER)
        keys = rows(k, place, there, k_row, HEAD_DIM, BLOCK_D, ALIGN)
        values = rows(v, place, there, v_row, HEAD_DIM, BLOCK_D, ALIGN)
        scores = tl.where(there[None, :], product(queries, keys, wide) * factor, float("-inf"))
        if DUAL:
            ahead = other[None, :] > offset[:, None]
            ds = _by_score(tl.where(ahead, scores, float("-inf")), grad, values, lse, delta, wide)
            scores = tl.where(ahead, float("-inf"), scores)
            ds += _by_score(scores, mixed, values, lse_mixed, delta_up, wide)
        else:
            ds = _by_score(scores, grad, values, lse, delta, wide)
        acc = dot(ds.to(dtype), keys, acc, wide)
    acc = tl.where(real[:, None], acc * tl.full((), scale, wide), 0.0)
    keep(grad_q, out, mine, 1, acc, HEAD_DIM, BLOCK_D, HEAD_DIM)


@triton.jit
def _by_weight(scores, values, grad, lse, delta, by_value, wide: tl.constexpr):
    """Gradient of a tile of scores with one column per query, and by_value + p^T g; a score of -inf gets 0."""
    p = tl.exp2(scores - lse[None, :])
    by_value = dot(p.to(grad.dtype), grad, by_value, wide)
    return p * (product(values, grad, wide) - delta[None, :]), by_value


@triton.jit
def _gradients_of_keys(
    q, keys, values, grads, lses, deltas, start, end, first, length, valid, holes, whole, q_row, out_row, factor,
    by_key, by_value, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return by_key + ds^T q and by_value + p^T g over the clear tiles of one head's queries from start to end."""
    wide: tl.constexpr = by_key.dtype
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        _, place, real = places(at, first, length, valid, holes, whole, BLOCK, CLEAR)
        out = place * out_row
        queries = rows(q, place, real, q_row, HEAD_DIM, BLOCK_D, ALIGN, CLEAR)
        grad = rows(grads, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM, CLEAR)
        scores = product(keys, queries, wide) * factor
        lse, delta = tl.load(lses + out), tl.load(deltas + out)
        ds, by_value = _by_weight(scores, values, grad, lse, delta, by_value, wide)
        by_key = dot(ds.to(keys.dtype), queries, by_key, wide)
    return by_key, by_value


@kernel
def attention_backward_kv(
    q, k, v, lse_causal, lse_full, spans, valid, grad_full, grad_mixed, delta_mixed, delta_full, grad_k, grad_v, gap,
    sequences, tokens, masked, whole, longest, tiles, heads, group, scale: tl.float64, q_batch: tl.int64,
    q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64, v_batch: tl.int64,
    v_head: tl.int64, v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, DUAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values from one query head, with one row per token and query head.

    No product needs a mask: a missing query is a row of zeros with a zero gradient, and the gradient of a missing key
    is never stored.
    """
    wide: tl.constexpr = lse_full.dtype.element_ty
    dtype: tl.constexpr = q.dtype.element_ty
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    base = batch * out_batch + head * out_head
    grad_k = begin(grad_k, base * HEAD_DIM)
    grad_v = begin(grad_v, base * HEAD_DIM)
    if batch == sequences:
        blank(grad_k, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        blank(grad_v, out_row, spans, sequences, tokens, tile, tiles, HEAD_DIM, BLOCK_D, BLOCK)
        return
    first, length, holes = sequence(spans, gap, batch, longest, masked)
    valid += batch * whole
    start = tile * BLOCK
    offset, position, real = places(start, first, length, valid, holes, whole, BLOCK)
    mine = offset < tl.maximum(length, whole)
    own = position * out_row
    by_key = tl.zeros((BLOCK, BLOCK_D), wide)
    by_value = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        keep(grad_k, own, mine, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
        keep(grad_v, own, mine, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
        return
    q = begin(q, (batch * q_batch + head * q_head) * ALIGN)
    k = begin(k, (batch * k_batch + head // group * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + head // group * v_head) * ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    keys = rows(k, position, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
    values = rows(v, position, real, v_row, HEAD_DIM, BLOCK_D, ALIGN)
    low, high, edge = _rest(start, length, holes, BLOCK, OTHER, DUAL)
    grad_full = begin(grad_full, base * HEAD_DIM)
    grad_mixed = begin(grad_mixed, base * HEAD_DIM)
    lse_full += base
    lse_causal += base
    delta_full += base
    delta_mixed += base
    if DUAL:
        by_key, by_value = _gradients_of_keys(
            q, keys, values, grad_full, lse_full, delta_full, 0, low, first, length, valid, holes, whole, q_row,
            out_row, factor, by_key, by_value, HEAD_DIM, BLOCK_D, OTHER, STAGES,
        )  # fmt: skip
        by_key, by_value = _gradients_of_keys(
            q, keys, values, grad_mixed, lse_causal, delta_mixed, high, edge, first, length, valid, holes, whole,
            q_row, out_row, factor, by_key, by_value, HEAD_DIM, BLOCK_D, OTHER, STAGES,
        )  # fmt: skip
    else:
        by_key, by_value = _gradients_of_keys(
            q, keys, values, grad_full, lse_full, delta_full, high, edge, first, length, valid, holes, whole, q_row,
            out_row, factor, by_key, by_value, HEAD_DIM, BLOCK_D, OTHER, STAGES,
        )  # fmt: skip
    for i in tl.range(0, _count(low, high, edge, length, OTHER), num_stages=1):
        other, place, there = places(_nth(i, low, high, edge, OTHER), first, length, valid, holes, whole, OTHER)
        out = place * out_row
        queries = rows(q, place, there, q_row, HEAD_DIM, BLOCK_D, ALIGN)
        grad = rows(grad_full, out, there, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
        lse, delta = tl.load(lse_full + out, there, 0.0), tl.load(delta_full + out, there, 0.0)
        scores = product(keys, queries, wide) * factor
        if DUAL:
            ahead = offset[:, None] > other[None, :]
            mixed = rows(grad_mixed, out, there, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
            lse_mixed = tl.load(lse_causal + out, there, 0.0)
            p = tl.exp2(scores - tl.where(ahead, lse[None, :], lse_mixed[None, :]))
            by_value = dot(tl.where(ahead, p, 0.0).to(dtype), grad, by_value, wide)
            by_value = dot(tl.where(ahead, 0.0, p).to(dtype), mixed, by_value, wide)
            delta_up = tl.load(delta_mixed + out, there, 0.0)
            by_p = tl.where(ahead, product(values, grad, wide), product(values, mixed, wide))
            ds = p * (by_p - tl.where(ahead, delta[None, :], delta_up[None, :]))
        else:
            ds, by_value = _by_weight(scores, values, grad, lse, delta, by_value, wide)
        by_key = dot(ds.to(dtype), queries, by_key, wide)
    by_key = tl.where(real[:, None], by_key * tl.full((), scale, wide), 0.0)
    by_value = tl.where(real[:, None], by_value, 0.0)
    keep(grad_k, own, mine, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
    keep(grad_v, own, mine, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
