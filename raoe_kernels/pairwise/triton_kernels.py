"""The losses in Triton: one launch of one program up to ONE_BLOCK pairs of float32 scores, several launches
beyond.

One program sorts (score, index) as 64-bit integers, and everything after it stays on chip: partners are found
by gathers in shared memory, and the loss and the gradient come from the same pass. What the call asks for
(tie rule, labels or not, which objective, gradient or not) are run-time scalars, so one compilation per block
size and dtype serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_compile import Variant, signature_of
from . import triton_multiblock
from .gradient import backward
from .params import PairwiseParams
from .triton_math import (
    DENSE,
    ORDINAL,
    TIES,
    angle,
    at,
    count_at_most,
    doubled_rank,
    exponent,
    larger,
    log_one_plus,
    lowest,
    masked,
    running,
    scalar,
    smaller,
    through_angle,
    total,
)

__all__ = ["ONE_BLOCK", "backward", "forward", "variants"]

# Pairs up to which one program does it all. A bitonic sort of 4,096 keys is 78 exchanges on one
# multiprocessor; more keys would no longer fit its registers.
ONE_BLOCK = 4096
ONE_BLOCK_DOUBLE = 1024  # for float64, which spills at twice that
# Block size: warps. Four elements a thread keep the exchanges of the sort within registers and shuffles; at
# 4,096 it takes eight, as 1,024 threads may have 64 registers each and that is not enough.
WARPS = {32: 1, 128: 1, 512: 4, 1024: 8, 2048: 8, 4096: 16}

SCALARS = [
    *("n", "threshold", "ties", "tau", "rank_weight", "angle_weight"),
    *("rank", "angular", "labelled", "parts", "need_grad"),
]
POINTERS = ["similarity", "scores", "labels", "losses", "grads"]


@triton.jit
def _flip(x, BLOCK: tl.constexpr):
    return tl.gather(x, BLOCK - 1 - tl.arange(0, BLOCK), 0)


@triton.jit
def _count_dense(number, bound, n, BLOCK: tl.constexpr):
    """How many positions have 2 number <= bound, number never decreasing: bisection by powers of two."""
    count = tl.zeros_like(number)
    step = BLOCK
    while step > 0:
        probe = count + step
        value = tl.gather(number, tl.minimum(probe, BLOCK) - 1, 0)
        count = tl.where((probe <= n) & (2 * value <= bound), probe, count)
        step = step // 2
    return count


@triton.jit
def _count(first, last, number, bound, ties, n, BLOCK: tl.constexpr):
    middle = tl.minimum(tl.maximum(bound >> 1, 0), n - 1)
    count = count_at_most(tl.gather(first, middle, 0), tl.gather(last, middle, 0), bound, ties)
    if ties == DENSE:
        count = _count_dense(number, bound, n, BLOCK)
    return count


@triton.jit
def _before(x, mask, end, BLOCK: tl.constexpr):
    """Sums of exp(x) over positions < end."""
    m, s = masked(x, mask)
    m, s = running(m, s)
    return at(m, s, end - 1, BLOCK)


@triton.jit
def _from(y, mask, start, BLOCK: tl.constexpr):
    """Sums of exp(y) over positions >= start."""
    m, s = masked(y, mask)
    m, s = running(_flip(m, BLOCK), _flip(s, BLOCK))
    return at(m, s, BLOCK - 1 - start, BLOCK)


@triton.jit
def _loss(x, pm, ps, qm, qs, inside):
    """L = log(1 + Z), Z = sum over j of exp(y_j + P_j), and dL/dx - dL/dy, where y = -x."""
    m, s = total(tl.where(inside, pm - x, lowest(x.dtype)), tl.where(inside, ps, 0.0))
    loss = log_one_plus(m, s)
    return loss, qs * tl.exp(x + qm - loss) - ps * tl.exp(pm - x - loss)


@triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)
def one_block(
    similarity, scores, labels, losses, grads, n, threshold, ties, tau: tl.float64, rank_weight: tl.float64,
    angle_weight: tl.float64, rank, angular, labelled, parts, need_grad, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = losses.dtype.element_ty
    p = tl.arange(0, BLOCK)
    inside = p < n

    # Order: float bits as an integer that sorts the same way, over the index. -0.0 equals 0.0.
    bits = tl.load(scores + p, inside, 0.0).to(tl.int32, bitcast=True)
    poisoned = tl.max(((bits & 0x7FFFFFFF) > 0x7F800000).to(tl.int32), 0)
    bits = tl.where(bits == -0x80000000, 0, bits)
    key = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    packed = tl.sort((key.to(tl.int64) << 32) | p.to(tl.int64))
    index = (packed & 0xFFFFFFFF).to(tl.int32)
    key = (packed >> 32).to(tl.int32)

    # Runs of equal scores.
    changes = (p > 0) & (key != tl.gather(key, tl.maximum(p - 1, 0), 0))
    ends = (p + 1 >= n) | (key != tl.gather(key, tl.minimum(p + 1, BLOCK - 1), 0))
    first = tl.associative_scan(tl.where(changes, p, 0), 0, larger)
    last = _flip(tl.associative_scan(_flip(tl.where(ends, p, n - 1), BLOCK), 0, smaller), BLOCK)

    c = tl.load(similarity + index, inside, 0.0).to(dtype)
    poisoned = tl.maximum(poisoned, tl.max((c != c).to(tl.int32), 0))
    poison = tl.where(poisoned > 0, float("nan"), 0.0).to(dtype)
    scale = scalar(tau, dtype)

    rank_loss = scalar(0.0, dtype)
    rank_slope = tl.zeros_like(c)
    if rank:  # Eq. 2: x = tau c over r_j - r_i > margin
        x = exponent(scale, c, tl.load(similarity).to(dtype))
        number = tl.cumsum(changes.to(tl.int32), 0)
        one = tl.where(ties == ORDINAL, p, first)
        end = tl.where(ties == ORDINAL, p, last)
        ranks = tl.where(ties == DENSE, 2 * number, doubled_rank(one, end, ties))
        below = _count(one, end, number, ranks - threshold, ties, n, BLOCK)
        reach = _count(one, end, number, ranks + (threshold - 1), ties, n, BLOCK)
        pm, ps = _before(x, inside, below, BLOCK)
        qm, qs = _from(-x, inside, reach, BLOCK)
        rank_loss, rank_slope = _loss(x, pm, ps, qm, qs, inside)
        weight = scalar(rank_weight, dtype)
        rank_loss = weight * rank_loss + poison
        rank_slope = weight * scale * rank_slope + poison

    angle_loss = scalar(0.0, dtype)
    angle_slope = tl.zeros_like(c)
    if angular:  # Eq. 3: x = -tau theta over s_i < s_j and l_i > l_j, one boundary between two labels at a time
        x = -exponent(scale, angle(c), angle(tl.load(similarity).to(dtype)))
        free = labelled + tl.zeros_like(p) == 0  # no label restricts a pair
        label = tl.load(labels + index, inside & (labelled + tl.zeros_like(p) != 0), 0)
        cur = tl.min(tl.where(inside, label, 0x7FFFFFFFFFFFFFFF), 0)
        highest = tl.max(tl.where(inside, label, -0x8000000000000000), 0)
        pm = tl.full((BLOCK,), lowest(dtype), dtype)
        ps = tl.zeros_like(c)
        qm = pm
        qs = ps
        more = (labelled == 0) | (cur < highest)
        while more:
            following = tl.min(tl.where(inside & (label > cur), label, highest), 0)
            above, above_s = _before(x, inside & (free | (label > cur)), first, BLOCK)
            under, under_s = _from(-x, inside & (free | (label <= cur)), last + 1, BLOCK)
            pm = tl.where(free | (label == cur), above, pm)
            ps = tl.where(free | (label == cur), above_s, ps)
            qm = tl.where(free | (label == following), under, qm)
            qs = tl.where(free | (label == following), under_s, qs)
            cur = following
            more = (labelled != 0) & (cur < highest)
        angle_loss, angle_slope = _loss(x, pm, ps, qm, qs, inside)
        weight = scalar(angle_weight, dtype)
        angle_loss = weight * angle_loss + poison
        angle_slope = through_angle(c, weight * scale * angle_slope) + poison

    if parts:
        tl.store(losses, rank_loss)
        tl.store(losses + 1, angle_loss)
    else:
        tl.store(losses, rank_loss + angle_loss)
    if need_grad:
        if parts:
            tl.store(grads + index, rank_slope, inside)
            tl.store(grads + n + index, angle_slope, inside)
        else:
            tl.store(grads + index, rank_slope + angle_slope, inside)


def forward(
    similarity: Tensor, scores: Tensor, labels: Tensor | None, params: PairwiseParams, need_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses and their gradients by similarity, as autograd.py says."""
    n = similarity.shape[0]
    narrow = similarity.dtype != torch.float64
    dtype = torch.float32 if narrow else torch.float64
    losses = similarity.new_empty(params.leading, dtype=dtype)
    grads = similarity.new_empty((*params.leading, n), dtype=dtype) if need_grad else None
    call = arguments(n, labels, params, need_grad)
    # Arguments that a call does not use have the type of those that others do: no second compilation.
    unused = similarity.new_empty(1, dtype=torch.int64) if labels is None else labels
    with torch.cuda.device_of(similarity):
        if scores.dtype == torch.float32 and n <= ONE_BLOCK and (narrow or n <= ONE_BLOCK_DOUBLE):
            block = next(size for size in WARPS if n <= size)
            one_block[(1,)](
                similarity, scores, unused, losses, losses if grads is None else grads, **call,
                BLOCK=block, num_warps=WARPS[block],
            )  # fmt: skip
        else:
            triton_multiblock.launch(similarity, scores, unused, losses, grads, call)
    return losses, grads


def arguments(n: int, labels: Tensor | None, params: PairwiseParams, need_grad: bool) -> dict[str, Any]:
    """What a call asks for, as the kernels' scalar arguments."""
    return dict(
        n=n,
        threshold=min(params.threshold, 2 * n + 1),  # beyond all ranks is beyond all ranks
        ties=TIES.index(params.ties),
        tau=params.tau,
        rank_weight=params.rank_weight,
        angle_weight=params.angle_weight,
        rank=int(params.rank),
        angular=int(params.angle),
        labelled=int(labels is not None),
        parts=int(params.parts),
        need_grad=int(need_grad),
    )


def variants() -> Iterator[Variant]:
    """Every compilation that calls can cause, for triton_compile: a training run sees one or two of them."""
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        wide = "*fp64" if dtype == "fp64" else "*fp32"
        for block, warps in WARPS.items():
            if dtype == "fp64" and block > ONE_BLOCK_DOUBLE:
                continue
            signature = signature_of(
                one_block, similarity=f"*{dtype}", scores="*fp32", labels="*i64", losses=wide, grads=wide
            )
            yield Variant(f"pairwise.one_block {dtype} {block}", one_block, signature, {"BLOCK": block}, warps)
    yield from triton_multiblock.variants()
