"""The backward kernels in Triton: one recomputed tile of scores serves both softmaxes.

With p = 2^(score - lse), o the output and g its gradient: ds = p (g v - g o), dq = scale ds k, dk = scale ds^T q,
dv = p^T g. Where a query may see a key in both softmaxes, p_full = w p_causal with w = 2^(lse_causal - lse_full) <= 1,
a number a row. So the two contributions are one, of the gradient w g_full + g_causal and of the delta (g o) mixed
alike: up to the diagonal the mixed gradient stands with the causal logsumexp, beyond it the full one with its own. The
kernel of queries comes first and stores the mixed ones; each of the two is one loop on either side of the diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import (
    ALIGN,
    ALL,
    BEYOND,
    LOG2_E,
    UP_TO,
    begin,
    dot,
    keep,
    kernel,
    places,
    product,
    rows,
    seen,
    sequence,
)


@triton.jit
def _gradient_of_queries(
    queries, k, v, grad, lse, delta, own, start, end, first, length, valid, masked, whole, k_row, v_row, factor, acc,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WHICH: tl.constexpr,
):  # fmt: skip
    """acc + ds k over the tiles of keys from start to end."""
    wide: tl.constexpr = acc.dtype
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        other, place, real = places(at, first, length, valid, masked, whole, BLOCK)
        keys = rows(k, place, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
        count = seen(real[None, :], own[:, None], other[None, :], WHICH)
        p = tl.exp2(tl.where(count, product(queries, keys, wide) * factor - lse[:, None], float("-inf")))
        by_p = product(grad, rows(v, place, real, v_row, HEAD_DIM, BLOCK_D, ALIGN), wide)
        acc = dot((p * (by_p - delta[:, None])).to(keys.dtype), keys, acc, wide)
    return acc


@kernel
def attention_backward_q(
    q, k, v, causal, full, lse_causal, lse_full, firsts, ends, valid, grad_causal, grad_full, grad_mixed, delta_mixed,
    delta_full, grad_q, masked, whole, longest, tiles, heads, group, scale: tl.float64, q_batch: tl.int64,
    q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64, v_batch: tl.int64,
    v_head: tl.int64, v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, DUAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, and for attention_backward_kv delta = g o and if DUAL the mixed gradient."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    dtype: tl.constexpr = q.dtype.element_ty
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
    grad_full = begin(grad_full, base * HEAD_DIM)
    grad_causal = begin(grad_causal, base * HEAD_DIM)
    grad_mixed = begin(grad_mixed, base * HEAD_DIM)
    grad_q = begin(grad_q, base * HEAD_DIM)
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
            queries, k, v, mixed, lse_mixed, delta_up, offset, 0, tl.minimum(start + BLOCK, length), first, length,
            valid, masked, whole, k_row, v_row, factor, acc, HEAD_DIM, BLOCK_D, OTHER, STAGES, UP_TO,
        )  # fmt: skip
        acc = _gradient_of_queries(
            queries, k, v, grad, lse, delta, offset, start, length, first, length, valid, masked, whole, k_row, v_row,
            factor, acc, HEAD_DIM, BLOCK_D, OTHER, STAGES, BEYOND,
        )  # fmt: skip
    else:
        acc = _gradient_of_queries(
            queries, k, v, grad, lse, delta, offset, 0, length, first, length, valid, masked, whole, k_row, v_row,
            factor, acc, HEAD_DIM, BLOCK_D, OTHER, STAGES, ALL,
        )  # fmt: skip
    acc = tl.where(real[:, None], acc * tl.full((), scale, wide), 0.0)
    keep(grad_q, out, mine, 1, acc, HEAD_DIM, BLOCK_D, HEAD_DIM)


@triton.jit
def _gradients_of_keys(
    q, keys, values, grads, lses, deltas, own, mine, start, end, first, length, valid, masked, whole, q_row, out_row,
    factor, by_key, by_value, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, WHICH: tl.constexpr,
):  # fmt: skip
    """by_key + ds^T q and by_value + p^T g over the tiles of one head's queries from start to end."""
    wide: tl.constexpr = by_key.dtype
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        other, place, real = places(at, first, length, valid, masked, whole, BLOCK)
        out = place * out_row
        queries = rows(q, place, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
        grad = rows(grads, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
        lse = tl.load(lses + out, real, 0.0)
        delta = tl.load(deltas + out, real, 0.0)
        count = seen(mine[:, None], other[None, :], own[:, None], WHICH)
        p = tl.exp2(tl.where(count, product(keys, queries, wide) * factor - lse[None, :], float("-inf")))
        by_value = dot(p.to(keys.dtype), grad, by_value, wide)
        ds = p * (product(values, grad, wide) - delta[None, :])
        by_key = dot(ds.to(keys.dtype), queries, by_key, wide)
    return by_key, by_value


@kernel
def attention_backward_kv(
    q, k, v, lse_causal, lse_full, firsts, ends, valid, grad_full, grad_mixed, delta_mixed, delta_full, grad_k, grad_v,
    masked, whole, longest, tiles, heads, group, scale: tl.float64, q_batch: tl.int64, q_head: tl.int64,
    q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64,
    v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64, own_batch: tl.int64,
    own_head: tl.int64, own_row: tl.int64, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    OTHER: tl.constexpr, DUAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, summed over the query heads that share them. `heads` are k's."""
    wide: tl.constexpr = lse_full.dtype.element_ty
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = (tl.program_id(0) // tiles // heads).to(tl.int64)
    first, length = sequence(firsts, ends, batch, longest)
    valid += batch * whole
    start = tile * BLOCK
    offset, position, real = places(start, first, length, valid, masked, whole, BLOCK)
    mine = offset < tl.maximum(length, whole)
    own = position * own_row
    grad_k = begin(grad_k, (batch * own_batch + head * own_head) * HEAD_DIM)
    grad_v = begin(grad_v, (batch * own_batch + head * own_head) * HEAD_DIM)
    by_key = tl.zeros((BLOCK, BLOCK_D), wide)
    by_value = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        keep(grad_k, own, mine, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
        keep(grad_v, own, mine, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
        return
    q = begin(q, batch * q_batch * ALIGN)
    k = begin(k, (batch * k_batch + head * k_head) * ALIGN)
    v = begin(v, (batch * v_batch + head * v_head) * ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    keys = rows(k, position, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
    values = rows(v, position, real, v_row, HEAD_DIM, BLOCK_D, ALIGN)
    for query_head in range(head * group, head * group + group):
        base = batch * out_batch + query_head * out_head
        its_q = begin(q, query_head * q_head * ALIGN)
        its_full = begin(grad_full, base * HEAD_DIM)
        its_mixed = begin(grad_mixed, base * HEAD_DIM)
        if DUAL:
            by_key, by_value = _gradients_of_keys(
                its_q, keys, values, its_full, lse_full + base, delta_full + base, offset, real, 0,
                tl.minimum(start + BLOCK, length), first, length, valid, masked, whole, q_row, out_row, factor, by_key,
                by_value, HEAD_DIM, BLOCK_D, OTHER, STAGES, BEYOND,
            )  # fmt: skip
            by_key, by_value = _gradients_of_keys(
                its_q, keys, values, its_mixed, lse_causal + base, delta_mixed + base, offset, real, start, length,
                first, length, valid, masked, whole, q_row, out_row, factor, by_key, by_value, HEAD_DIM, BLOCK_D, OTHER,
                STAGES, UP_TO,
            )  # fmt: skip
        else:
            by_key, by_value = _gradients_of_keys(
                its_q, keys, values, its_full, lse_full + base, delta_full + base, offset, real, 0, length, first,
                length, valid, masked, whole, q_row, out_row, factor, by_key, by_value, HEAD_DIM, BLOCK_D, OTHER,
                STAGES, ALL,
            )  # fmt: skip
    by_key = tl.where(real[:, None], by_key * tl.full((), scale, wide), 0.0)
    by_value = tl.where(real[:, None], by_value, 0.0)
    keep(grad_k, own, mine, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
    keep(grad_v, own, mine, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
