"""The losses in Triton for any number of pairs: torch.sort, then scans over fixed tiles.

    distinct_labels, label_table   the smallest LIMIT + 1 distinct labels, found on the device
    tile_sums        each tile alone: its runs of equal scores, its share of every prefix and suffix sum
    scan_tiles       with the shares of the other tiles: the rank objective's prefix and suffix sums
    rank_partners    each pair's partners, looked up in those
    label_partners   the same for the angular objective, whose partners' sums need no table
    finish           the loss, and the gradient in the caller's order

A tile adds up the other tiles' shares by itself, in a fixed order, so that results are equal from run to run:
(B / TILE)^2 reads a sum, 2^20 at B = 2^20. No shape depends on data, and no value is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_compile import Variant, signature_of
from .triton_labels import COUNT, ENTRIES, distinct_labels, label_partners, label_table
from .triton_math import (
    DENSE,
    ORDINAL,
    angle,
    count_at_most,
    doubled_rank,
    exponent,
    join,
    log_one_plus,
    logarithm,
    lowest,
    masked,
    running,
    scalar,
    through_angle,
)
from .triton_tiles import (
    BEFORE,
    BEFORE_LAST_RUN,
    BEHIND,
    COLUMNS,
    FROM_FIRST_RUN,
    LIMIT,
    POINTERS,
    SPAN,
    changes_at,
    keep,
    keep_partners,
    kernel,
    over_tiles,
    runs_of_tile,
    slot,
)

TILE = 1024  # pairs a program, four to a thread. Smaller in tests.
WARPS = 8


@kernel
def tile_sums(
    similarity, values, order, labels, table, cs, sums, runs, nans, n, tiles, tau: tl.float64, rank, angular,
    labelled, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    inside = p < n
    value = tl.load(values + p, inside, 0)
    index = tl.load(order + p, inside, 0)
    dtype: tl.constexpr = cs.dtype.element_ty
    c = tl.load(similarity + index, inside, 0.0).to(dtype)
    tl.store(cs + p, c, inside)
    tl.store(nans + tile, tl.max(((c != c) | (value != value)).to(tl.int32), 0))

    changes = changes_at(values, p, n)
    start = tl.min(tl.where(changes, p, n), 0)
    end = tl.max(tl.where(changes, p, -1), 0)
    tl.store(runs + tile, start)
    tl.store(runs + tiles + tile, end)
    tl.store(runs + tiles * 2 + tile, tl.sum(changes.to(tl.int64), 0))

    scale = scalar(tau, dtype)
    if rank:
        x = exponent(scale, c, tl.load(similarity).to(dtype))
        keep(sums, 0, BEFORE, tile, tiles, x, inside)
        keep(sums, 0, BEHIND, tile, tiles, -x, inside)
    if angular:
        x = -exponent(scale, angle(c), angle(tl.load(similarity).to(dtype)))
        free = labelled + tl.zeros((TILE,), tl.int32) == 0  # no label restricts a pair
        label = tl.load(labels + index, inside & (labelled + tl.zeros((TILE,), tl.int32) != 0), 0)
        columns = tl.full((), 1, tl.int64)
        if labelled:
            classes = tl.load(table + COUNT)
            columns = tl.where(classes > LIMIT, 0, classes - 1)
        for k in range(columns):
            cur = tl.load(table + k, labelled != 0, 0)
            above = inside & (free | (label > cur))
            under = inside & (free | (label <= cur))
            keep(sums, 1 + k, BEFORE, tile, tiles, x, above)
            keep(sums, 1 + k, BEFORE_LAST_RUN, tile, tiles, x, above & (p < end))
            keep(sums, 1 + k, BEHIND, tile, tiles, -x, under)
            keep(sums, 1 + k, FROM_FIRST_RUN, tile, tiles, -x, under & (p >= start))


@kernel
def scan_tiles(
    similarity,
    values,
    cs,
    sums,
    runs,
    first,
    last,
    prefix,
    suffix,
    n,
    tiles,
    ties,
    tau: tl.float64,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, TILE)
    p = tile * TILE + o
    inside = p < n
    dtype: tl.constexpr = cs.dtype.element_ty
    begin, finish, coming, following, number = runs_of_tile(values, runs, tile, n, tiles, TILE)
    if ties == DENSE:  # `first` says the number of each position's run, `last` where each run ends
        tl.store(first + p, number, inside)
        tl.store(last + number, p, inside & (o == finish))
    else:
        begin_at = tl.where(begin < 0, coming, tile * TILE + begin)
        end_at = tl.where(finish == TILE, following - 1, tile * TILE + finish)
        tl.store(first + p, tl.where(ties == ORDINAL, p, begin_at), inside)
        tl.store(last + p, tl.where(ties == ORDINAL, p, end_at), inside)

    scale = scalar(tau, dtype)
    origin = tl.load(similarity).to(dtype)
    m, s = masked(exponent(scale, tl.load(cs + p, inside, 0.0), origin), inside)
    m, s = running(m, s)
    other, other_s = over_tiles(slot(sums, 0, BEFORE, tiles), 0, tile, tiles)
    m, s = join(m, s, other + tl.zeros_like(m), other_s + tl.zeros_like(s))
    tl.store(prefix + p, m, inside)
    tl.store(prefix + n + p, s, inside)
    back = tile * TILE + TILE - 1 - o
    m, s = masked(-exponent(scale, tl.load(cs + back, back < n, 0.0), origin), back < n)
    m, s = running(m, s)
    other, other_s = over_tiles(slot(sums, 0, BEHIND, tiles), tile + 1, tiles, tiles)
    m, s = join(m, s, other + tl.zeros_like(m), other_s + tl.zeros_like(s))
    tl.store(suffix + back, m, back < n)
    tl.store(suffix + n + back, s, back < n)


@triton.jit
def _count(first, last, bound, n, runs, ties):
    """How many positions have a doubled rank of at most `bound`."""
    middle = tl.minimum(tl.maximum(bound >> 1, 0), n - 1)
    if ties == DENSE:
        count = tl.load(last + tl.minimum(middle, runs - 1)).to(tl.int64) + 1
        count = tl.where(bound < 0, 0, count)
    else:
        count = count_at_most(tl.load(first + middle).to(tl.int64), tl.load(last + middle).to(tl.int64), bound, ties)
    return count


@kernel
def rank_partners(
    similarity, cs, first, last, prefix, suffix, upper, lower, joined, n, tiles, threshold, ties, tau:
    tl.float64, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    inside = p < n
    dtype: tl.constexpr = cs.dtype.element_ty
    begin = tl.load(first + p, inside, 0).to(tl.int64)
    ranks = tl.where(ties == DENSE, 2 * begin, doubled_rank(begin, tl.load(last + p, inside, 0).to(tl.int64), ties))
    runs = tl.load(first + n - 1).to(tl.int64) + 1  # under dense ranks
    end = _count(first, last, ranks - threshold, n, runs, ties) - 1
    start = _count(first, last, ranks + (threshold - 1), n, runs, ties)
    x = exponent(scalar(tau, dtype), tl.load(cs + p, inside, 0.0), tl.load(similarity).to(dtype))
    exists = inside & (end >= 0)
    pm = tl.load(prefix + end, exists, lowest(dtype))
    ps = tl.load(prefix + n + end, exists, 0.0)
    exists = inside & (start < n)
    qm = tl.load(suffix + start, exists, lowest(dtype))
    qs = tl.load(suffix + n + start, exists, 0.0)
    tl.store(upper + p, x + logarithm(qm, qs), inside)
    keep_partners(lower, joined, p, inside, -x, pm, ps, tile, tiles)


@triton.jit
def _loss(joined, tiles):
    m, s = over_tiles(joined, 0, tiles, tiles)
    return log_one_plus(m, s)


@kernel
def finish(
    order, cs, nans, upper, lower, joined, losses, grads, n, tiles, tau: tl.float64, rank_weight: tl.float64,
    angle_weight: tl.float64, rank, angular, parts, need_grad, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    inside = p < n
    dtype: tl.constexpr = cs.dtype.element_ty
    c = tl.load(cs + p, inside, 0.0)
    poisoned = tl.zeros((SPAN,), tl.int32)
    for chunk in range(0, tiles, SPAN):
        t = chunk + tl.arange(0, SPAN)
        poisoned = tl.maximum(poisoned, tl.load(nans + t, t < tiles, 0))
    poison = tl.where(tl.max(poisoned, 0) > 0, float("nan"), 0.0).to(dtype)
    scale = scalar(tau, dtype)

    rank_loss = scalar(0.0, dtype)
    rank_slope = tl.zeros_like(c)
    if rank:
        loss = _loss(joined, tiles)
        weight = scalar(rank_weight, dtype)
        rank_loss = weight * loss + poison
        if need_grad:
            rank_slope = tl.exp(tl.load(upper + p, inside, 0.0) - loss)
            rank_slope -= tl.exp(tl.load(lower + p, inside, 0.0) - loss)
            rank_slope = weight * scale * rank_slope + poison
    angle_loss = scalar(0.0, dtype)
    angle_slope = tl.zeros_like(c)
    if angular:
        loss = _loss(joined + 2 * tiles, tiles)
        weight = scalar(angle_weight, dtype)
        angle_loss = weight * loss + poison
        if need_grad:
            angle_slope = tl.exp(tl.load(upper + n + p, inside, 0.0) - loss)
            angle_slope -= tl.exp(tl.load(lower + n + p, inside, 0.0) - loss)
            angle_slope = through_angle(c, weight * scale * angle_slope) + poison

    if tile == 0:
        if parts:
            tl.store(losses, rank_loss)
            tl.store(losses + 1, angle_loss)
        else:
            tl.store(losses, rank_loss + angle_loss)
    if need_grad:
        index = tl.load(order + p, inside, 0)
        if parts:
            tl.store(grads + index, rank_slope, inside)
            tl.store(grads + n + index, angle_slope, inside)
        else:
            tl.store(grads + index, rank_slope + angle_slope, inside)


KERNELS = (distinct_labels, label_table, tile_sums, scan_tiles, rank_partners, label_partners, finish)


def launch(
    similarity: Tensor,
    scores: Tensor,
    labels: Tensor,
    losses: Tensor,
    grads: Tensor | None,
    call: dict[str, Any],
) -> None:
    """Fill losses and grads; `call` as triton_kernels.arguments makes it."""
    n = call["n"]
    tiles = triton.cdiv(n, TILE)

    def scratch(*shape: int, dtype: torch.dtype = losses.dtype) -> Tensor:
        return losses.new_empty(shape, dtype=dtype)

    values, order = torch.sort(scores, stable=True)
    places = torch.int32 if n < 1 << 30 else torch.int64
    first, last = scratch(2, n, dtype=places)
    cs, prefix, suffix, upper, lower = scratch(n), *scratch(4, 2, n)
    tensors = dict(
        similarity=similarity, values=values, order=order, labels=labels, cs=cs, first=first, last=last,
        prefix=prefix, suffix=suffix, upper=upper, lower=lower, losses=losses,
        grads=losses if grads is None else grads,
        sums=scratch(COLUMNS, 4, 2, tiles), joined=scratch(2, 2, tiles),
        table=scratch(ENTRIES.value, dtype=torch.int64), runs=scratch(3, tiles, dtype=torch.int64),
        distinct=scratch(tiles, LIMIT.value + 1, dtype=torch.int64), nans=scratch(tiles, dtype=torch.int32),
    )  # fmt: skip

    available = {**tensors, **call, "tiles": tiles, "TILE": TILE}

    def run(function: Any, grid: int) -> None:
        function[(grid,)](**{name: available[name] for name in function.arg_names}, num_warps=WARPS)

    if call["angular"] and call["labelled"]:
        run(distinct_labels, tiles)
        run(label_table, 1)
    run(tile_sums, tiles)
    if call["rank"]:
        run(scan_tiles, tiles)
        run(rank_partners, tiles)
    if call["angular"]:
        run(label_partners, tiles)
    run(finish, tiles if call["need_grad"] else 1)


def variants() -> Iterator[Variant]:
    """What calls with fewer than 2^30 pairs compile, for triton_compile: each dtype of each argument once."""
    pairs = [
        ("fp32", "fp32"),
        ("fp32", "fp64"),
        ("fp32", "i64"),
        ("fp16", "fp32"),
        ("bf16", "fp32"),
        ("fp64", "fp64"),
    ]
    seen = set()
    for dtype, scores in pairs:
        wide = "*fp64" if dtype == "fp64" else "*fp32"
        pointers = dict.fromkeys(POINTERS, wide) | dict.fromkeys(("first", "last", "nans"), "*i32")
        pointers |= dict.fromkeys(("order", "labels", "table", "distinct", "runs"), "*i64")
        pointers |= dict(similarity=f"*{dtype}", values=f"*{scores}")
        for function in KERNELS:
            used = [name for name in ("similarity", "values", "cs") if name in function.arg_names]
            name = " ".join([f"pairwise.{function.__name__}", *(pointers[name][1:] for name in used)])
            if name not in seen:
                seen.add(name)
                yield Variant(name, function, signature_of(function, **pointers), {"TILE": TILE}, WARPS)
