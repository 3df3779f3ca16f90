"""Pairwise losses in Triton with a single kernel launch, for batches that fit into one program.

The kernel sorts (score, index) pairs, packed as 64-bit integers. All later steps stay on chip: gathers in shared
memory look up the partners, and one pass computes loss and gradient. Options (tie rule, labels, objectives, gradient)
are run-time scalars, so all calls with the same block size and the same dtypes use the same compiled kernel.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._contract import Gradients, Needs
from ..triton_rows import kernel
from .problem import ONE_BLOCK_DOUBLE, Problem, by_row
from .triton_block import between, by_labels, count_ranks, flip, maximum, minimum, order_key
from .triton_math import (
    DENSE,
    ORDINAL,
    TIES,
    doubled_rank,
    exponents,
    inverses,
    log_one_plus,
    product,
    scalar,
    slope,
    terms,
    through_angle,
    total,
)

# {block size: number of warps}. With four elements per thread, the sort needs only registers and shuffles.
WARPS = {128: 1, 512: 4, 1024: 8, 2048: 16}


@kernel
def one_block(
    similarity, scores, labels, losses, grads, n, threshold, ties, room: tl.float64, scale: tl.float64,
    rank_weight: tl.float64, angle_weight: tl.float64, rank, angular, has_labels, parts, need_grad, floating,
    BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = losses.dtype.element_ty
    p = tl.arange(0, BLOCK)
    in_batch = p < n
    key, has_nan = order_key(scores, p, in_batch, floating, BLOCK)
    packed = tl.sort((key.to(tl.int64) << 32) | p.to(tl.int64))
    index = (packed & 0xFFFFFFFF).to(tl.int32)
    key = (packed >> 32).to(tl.int32)

    # First and last position of each run of equal scores.
    changes = (p > 0) & (key != tl.gather(key, tl.maximum(p - 1, 0), 0))
    ends = (p + 1 >= n) | (key != tl.gather(key, tl.minimum(p + 1, BLOCK - 1), 0))
    first = tl.associative_scan(tl.where(changes, p, 0), 0, maximum)
    last = flip(tl.associative_scan(flip(tl.where(ends, p, n - 1), BLOCK), 0, minimum), BLOCK)

    c = tl.load(similarity + index, in_batch, 0.0).to(dtype)
    has_nan = tl.maximum(has_nan, tl.max((c != c).to(tl.int32), 0))
    poison = tl.where(has_nan > 0, float("nan"), 0.0).to(dtype)
    low = tl.min(tl.where(in_batch, c, float("inf")), 0)
    high = tl.max(tl.where(in_batch, c, float("-inf")), 0)
    factor = scalar(scale, dtype)

    rank_loss = scalar(0.0, dtype)
    rank_slope = tl.zeros_like(c)
    if rank:  # Eq. 2: x = scale c, for pairs with r_j - r_i > margin
        x, reach = exponents(c, low, high, factor, False)
        linear = reach < scalar(room, dtype)
        number = tl.cumsum(changes.to(tl.int32), 0)
        one = tl.where(ties == ORDINAL, p, first)
        end = tl.where(ties == ORDINAL, p, last)
        ranks = tl.where(ties == DENSE, 2 * number, doubled_rank(one, end, ties))
        below = count_ranks(one, end, number, ranks - threshold, ties, n, BLOCK)
        reached = count_ranks(one, end, number, ranks + (threshold - 1), ties, n, BLOCK)
        up = terms(x, in_batch, linear)
        down = inverses(up, in_batch, linear)
        before, behind = between(up, down, below, reached, linear, BLOCK)
        z = total(product(down, before, linear), linear)
        rank_loss = log_one_plus(z, linear)
        weight = scalar(rank_weight, dtype)
        rank_slope = weight * factor * slope(up, down, before, behind, z, rank_loss, linear) + poison
        rank_loss = weight * rank_loss + poison

    angle_loss = scalar(0.0, dtype)
    angle_slope = tl.zeros_like(c)
    if angular:  # Eq. 3: x = -scale theta, for pairs with s_i < s_j and l_i > l_j
        x, reach = exponents(c, low, high, factor, True)
        linear = reach < scalar(room, dtype)
        up = terms(x, in_batch, linear)
        if has_labels:
            label = tl.load(labels + index, in_batch, 0)
            before, behind, place, up = by_labels(label, first, in_batch, up, linear, BLOCK)
            place = place & 0xFFFF
            index = tl.gather(index, place, 0)
            c = tl.load(similarity + index, in_batch, 0.0).to(dtype)
            rank_slope = tl.gather(rank_slope, place, 0)
        else:
            before, behind = between(up, inverses(up, in_batch, linear), first, last + 1, linear, BLOCK)
        down = inverses(up, in_batch, linear)
        z = total(product(down, before, linear), linear)
        angle_loss = log_one_plus(z, linear)
        weight = scalar(angle_weight, dtype)
        by_angle = weight * factor * slope(up, down, before, behind, z, angle_loss, linear)
        angle_slope = through_angle(c, by_angle) + poison
        angle_loss = weight * angle_loss + poison

    if parts:
        tl.store(losses, rank_loss)
        tl.store(losses + 1, angle_loss)
    else:
        tl.store(losses, rank_loss + angle_loss)
    if need_grad:
        if parts:
            tl.store(grads + index, rank_slope, in_batch)
            tl.store(grads + n + index, angle_slope, in_batch)
        else:
            tl.store(grads + index, rank_slope + angle_slope, in_batch)


def _dense_ranks(scores: Tensor) -> Tensor:
    """Return float32 numbers that sort like the scores: equal for equal scores, and NaN for NaN."""
    values, order = scores.sort()
    ranks = torch.cat([order.new_zeros(1), (values[1:] != values[:-1]).cumsum(0)])
    ranks = ranks.to(torch.float32).masked_fill(values.isnan(), torch.nan)
    return torch.empty_like(ranks).scatter_(0, order, ranks)


@by_row
def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the losses and their gradients with respect to similarity, both (2, B) with problem.parts, else (B,)."""
    similarity, scores = problem.similarity.contiguous(), problem.scores.contiguous()
    labels = None if problem.labels is None else problem.labels.contiguous()
    n = similarity.shape[0]
    is_float32 = similarity.dtype != torch.float64
    dtype = torch.float32 if is_float32 else torch.float64
    if n > (limit := problem.max_pairs()):
        most = f"at most {limit:,} pairs with similarities in {str(similarity.dtype).removeprefix('torch.')}"
        raise RuntimeError(f"backend 'triton' supports {most}, got {n:,}; use backend='scan'")
    if n > ONE_BLOCK_DOUBLE and scores.dtype != torch.float32:
        scores = _dense_ranks(scores)  # the kernel has no room to sort so many 64-bit scores
    if similarity.dtype != dtype and scores.dtype != torch.float32:
        similarity = similarity.to(dtype)  # half precision with 64-bit scores is rare, so it has no kernel
    losses = torch.empty(problem.leading, dtype=dtype, device=similarity.device)
    grads = torch.empty((*problem.leading, n), dtype=dtype, device=similarity.device) if needs[0] else None
    # Pass unused arguments with the dtype that they have in other calls, so that the kernel is not compiled again.
    unused = triton.reinterpret(losses, tl.int64) if labels is None else labels
    sort_keys = triton.reinterpret(scores, tl.int64) if scores.dtype == torch.float64 else scores
    block = next(size for size in WARPS if n <= size)
    with torch.cuda.device_of(similarity):
        one_block[(1,)](
            similarity, sort_keys, unused, losses, losses if grads is None else grads, n,
            min(problem.threshold, 2 * n + 1),  # like any larger threshold, 2 n + 1 selects no pair
            TIES.index(problem.ties),
            (85 if is_float32 else 680) - 2 * math.log(n),  # Z has fewer than n^2 terms, each below exp(scale x range)
            problem.scale, problem.rank_weight, problem.angle_weight, int(problem.rank), int(problem.angle),
            int(labels is not None), int(problem.parts), int(needs[0]), int(scores.is_floating_point()),
            BLOCK=block, num_warps=WARPS[block],
        )  # fmt: skip
    return losses, (grads,)
