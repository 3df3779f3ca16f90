"""The backward kernels in Triton: one recomputed tile of scores serves both softmaxes.

With p = 2^(score - lse), o the output and g its gradient: ds = p (g v - g o), dq = scale ds k, dk = scale ds^T q,
dv = p^T g. Where a query may see a key in both softmaxes, p_full = w p_causal with w = 2^(lse_causal - lse_full) <= 1, a
number a row. So the two contributions are one, of the gradient w g_full + g_causal and of the delta (g o) mixed alike:
before the diagonal the mixed gradient stands, after it the full one, and only the diagonal tile needs both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from raoe_kernels.attention.triton_forward import LOG2_E, begin, dot, keep, kernel, places, product, rows, sequence


@triton.jit
def _mix(of_causal, of_full, lse_causal, lse_full):
    """w of_full + of_causal: what stands for both where a query sees a key in both; for rows and for numbers."""
    w = tl.exp2(lse_causal - lse_full)
    if len(of_full.shape) == 2:
        return w[:, None] * of_full + of_causal
    else:
        return w * of_full + of_causal


@kernel
def attention_backward_q(
    q, k, v, causal, full, lse_causal, lse_full, firsts, ends, valid, grad_causal, grad_full, delta_causal, delta_full,
    grad_q, masked, whole, longest, tiles, heads, group, scale: tl.float64, q_batch: tl.int64, q_head: tl.int64,
    q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64,
    v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, DUAL: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """delta = g o of both parts, for attention_backward_kv, and the gradient of a tile of queries."""
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
    full = begin(full, base * HEAD_DIM, ALIGN)
    causal = begin(causal, base * HEAD_DIM, ALIGN)
    grad_full = begin(grad_full, base * HEAD_DIM, ALIGN)
    grad_causal = begin(grad_causal, base * HEAD_DIM, ALIGN)
    grad_q = begin(grad_q, base * HEAD_DIM, ALIGN)
    lse_full += base
    lse_causal += base
    delta_full += base
    delta_causal += base
    acc = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        keep(grad_q, out, mine, 1, acc, HEAD_DIM, BLOCK_D, HEAD_DIM)
        return
    q = begin(q, (batch * q_batch + head * q_head) * ALIGN, ALIGN)
    k = begin(k, (batch * k_batch + head // group * k_head) * ALIGN, ALIGN)
    v = begin(v, (batch * v_batch + head // group * v_head) * ALIGN, ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    grad = rows(grad_full, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
    delta = tl.sum(grad.to(wide) * rows(full, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide), 1)
    lse = tl.load(lse_full + out, real, 0.0)
    tl.store(delta_full + out, delta, real)
    queries = rows(q, position, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
    after = 0
    if DUAL:
        mixed = rows(grad_causal, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide)
        delta_mixed = tl.sum(mixed * rows(causal, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide), 1)
        tl.store(delta_causal + out, delta_mixed, real)
        lse_mixed = tl.load(lse_causal + out, real, 0.0)
        mixed = _mix(mixed, grad.to(wide), lse_mixed, lse).to(dtype)
        delta_mixed = _mix(delta_mixed, delta, lse_mixed, lse)
        for other in tl.range(0, start, BLOCK, num_stages=STAGES):
            _, place, there = places(other, first, length, valid, masked, whole, BLOCK)
            keys = rows(k, place, there, k_row, HEAD_DIM, BLOCK_D, ALIGN)
            scores = tl.where(there[None, :], product(queries, keys, wide) * factor, float("-inf"))
            p = tl.exp2(scores - lse_mixed[:, None])
            by_p = product(mixed, rows(v, place, there, v_row, HEAD_DIM, BLOCK_D, ALIGN), wide)
            ds = p * (by_p - delta_mixed[:, None])
            acc = dot(ds.to(dtype), keys, acc, wide)
        keys = rows(k, position, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
        values = rows(v, position, real, v_row, HEAD_DIM, BLOCK_D, ALIGN)
        below = offset[None, :] <= offset[:, None]
        scores = tl.where(real[None, :], product(queries, keys, wide) * factor, float("-inf"))
        p = tl.exp2(scores - tl.where(below, lse_mixed[:, None], lse[:, None]))
        by_p = tl.where(below, product(mixed, values, wide) - delta_mixed[:, None],
                        product(grad, values, wide) - delta[:, None])  # fmt: skip
        acc = dot((p * by_p).to(dtype), keys, acc, wide)
        after = start + BLOCK
    for other in tl.range(after, length, BLOCK, num_stages=STAGES):
        _, place, there = places(other, first, length, valid, masked, whole, BLOCK)
        keys = rows(k, place, there, k_row, HEAD_DIM, BLOCK_D, ALIGN)
        scores = tl.where(there[None, :], product(queries, keys, wide) * factor, float("-inf"))
        p = tl.exp2(scores - lse[:, None])
        by_p = product(grad, rows(v, place, there, v_row, HEAD_DIM, BLOCK_D, ALIGN), wide)
        acc = dot((p * (by_p - delta[:, None])).to(dtype), keys, acc, wide)
    acc = tl.where(real[:, None], acc * tl.full((), scale, wide), 0.0)
    keep(grad_q, out, mine, 1, acc, HEAD_DIM, BLOCK_D, HEAD_DIM)


@kernel
def attention_backward_kv(
    q, k, v, lse_causal, lse_full, firsts, ends, valid, grad_causal, grad_full, delta_causal, delta_full, grad_k,
    grad_v, masked, whole, longest, tiles, heads, group, scale: tl.float64, q_batch: tl.int64, q_head: tl.int64,
    q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64, v_batch: tl.int64, v_head: tl.int64,
    v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64, own_batch: tl.int64,
    own_head: tl.int64, own_row: tl.int64, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    DUAL: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, summed over the query heads that share them. `heads` are k's."""
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
    own = position * own_row
    grad_k = begin(grad_k, (batch * own_batch + head * own_head) * HEAD_DIM, ALIGN)
    grad_v = begin(grad_v, (batch * own_batch + head * own_head) * HEAD_DIM, ALIGN)
    by_key = tl.zeros((BLOCK, BLOCK_D), wide)
    by_value = tl.zeros((BLOCK, BLOCK_D), wide)
    if start >= length:
        keep(grad_k, own, mine, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
        keep(grad_v, own, mine, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
        return
    q = begin(q, batch * q_batch * ALIGN, ALIGN)
    k = begin(k, (batch * k_batch + head * k_head) * ALIGN, ALIGN)
    v = begin(v, (batch * v_batch + head * v_head) * ALIGN, ALIGN)
    factor = tl.full((), scale, wide) * LOG2_E
    keys = rows(k, position, real, k_row, HEAD_DIM, BLOCK_D, ALIGN)
    values = rows(v, position, real, v_row, HEAD_DIM, BLOCK_D, ALIGN)
    for query_head in range(head * group, head * group + group):
        base = batch * out_batch + query_head * out_head
        its_q = begin(q, query_head * q_head * ALIGN, ALIGN)
        its_full = begin(grad_full, base * HEAD_DIM, ALIGN)
        its_causal = begin(grad_causal, base * HEAD_DIM, ALIGN)
        before = start if DUAL else length
        for other in tl.range(0, before, BLOCK, num_stages=STAGES):
            _, place, there = places(other, first, length, valid, masked, whole, BLOCK)
            out = place * out_row
            queries = rows(its_q, place, there, q_row, HEAD_DIM, BLOCK_D, ALIGN)
            grad = rows(its_full, out, there, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
            delta = tl.load(delta_full + base + out, there, 0.0)
            lse = tl.load(lse_full + base + out, there, 0.0)
            p = tl.exp2(tl.where(real[:, None], product(keys, queries, wide) * factor, float("-inf")) - lse[None, :])
            ds = p * (product(values, grad, wide) - delta[None, :])
            by_value = dot(p.to(dtype), grad, by_value, wide)
            by_key = dot(ds.to(dtype), queries, by_key, wide)
        if DUAL:
            out = position * out_row
            queries = rows(its_q, position, real, q_row, HEAD_DIM, BLOCK_D, ALIGN)
            grad = rows(its_full, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
            mixed = rows(its_causal, out, real, 1, HEAD_DIM, BLOCK_D, HEAD_DIM)
            lse = tl.load(lse_full + base + out, real, 0.0)
            lse_mixed = tl.load(lse_causal + base + out, real, 0.0)
            delta = tl.load(delta_full + base + out, real, 0.0)
            delta_mixed = _mix(tl.load(delta_causal + base + out, real, 0.0), delta, lse_mixed, lse)
            mixed = _mix(mixed.to(wide), grad.to(wide), lse_mixed, lse).to(dtype)
            below = offset[:, None] <= offset[None, :]
            scores = tl.where(real[:, None], product(keys, queries, wide) * factor, float("-inf"))
            p = tl.exp2(scores - tl.where(below, lse_mixed[None, :], lse[None, :]))
            by_p = tl.where(below, product(values, mixed, wide) - delta_mixed[None, :],
                            product(values, grad, wide) - delta[None, :])  # fmt: skip
            shared = tl.where(below, p, 0.0).to(dtype)
            alone = tl.where(below, 0.0, p).to(dtype)
            by_value = dot(shared, mixed, by_value, wide)
            by_value = dot(alone, grad, by_value, wide)
            by_key = dot((p * by_p).to(dtype), queries, by_key, wide)
            for other in tl.range(start + BLOCK, length, BLOCK, num_stages=STAGES):
                _, place, there = places(other, first, length, valid, masked, whole, BLOCK)
                out = place * out_row
                queries = rows(its_q, place, there, q_row, HEAD_DIM, BLOCK_D, ALIGN)
                lse = tl.load(lse_full + base + out, there, 0.0)
                lse_mixed = tl.load(lse_causal + base + out, there, 0.0)
                delta = _mix(tl.load(delta_causal + base + out, there, 0.0), tl.load(delta_full + base + out, there, 0.0),
                             lse_mixed, lse)  # fmt: skip
                mixed = _mix(rows(its_causal, out, there, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide),
                             rows(its_full, out, there, 1, HEAD_DIM, BLOCK_D, HEAD_DIM).to(wide),
                             lse_mixed, lse).to(dtype)  # fmt: skip
                scores = tl.where(real[:, None], product(keys, queries, wide) * factor, float("-inf"))
                p = tl.exp2(scores - lse_mixed[None, :])
                ds = p * (product(values, mixed, wide) - delta[None, :])
                by_value = dot(p.to(dtype), mixed, by_value, wide)
                by_key = dot(ds.to(dtype), queries, by_key, wide)
    by_key = tl.where(real[:, None], by_key * tl.full((), scale, wide), 0.0)
    by_value = tl.where(real[:, None], by_value, 0.0)
    keep(grad_k, own, mine, 1, by_key, HEAD_DIM, BLOCK_D, HEAD_DIM)
    keep(grad_v, own, mine, 1, by_value, HEAD_DIM, BLOCK_D, HEAD_DIM)
