"""The losses in Triton for any number of pairs: torch.sort, then fixed tiles of the sorted order.

    tile_sums   each tile alone: what it adds to prefixes and suffixes; its pairs' partners by label within it
    merge_tiles neighbours, WAYS at a time: partners by label across them, and their pairs in one order of the labels
    prefixes    with what the other tiles add: prefix and suffix sums of the objectives that labels do not restrict
    partners    each pair's partners looked up there: the tiles' shares of Z; and once more for loss and gradient

Tiles are merged as a merge sort by label would, each pair finding its place among the neighbours' labels by bisection.
A block of merged tiles keeps, in the order of the labels, the sums of exp(x) from each pair on and of exp(y) up to it:
what a pair finds at its place in an earlier block is the sum over the larger labels there. Any labels cost the same,
O(B log^2 B) comparisons. A tile adds up the other tiles' shares by itself, in a fixed order, so that results are
equal from run to run. No shape depends on data, and no value is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_compile import Variant, signature_of
from ..triton_rows import kernel
from .triton_block import by_labels, flip
from .triton_math import (
    AVERAGE,
    DENSE,
    ORDINAL,
    count_at_most,
    doubled_rank,
    exponents,
    inverses,
    log_one_plus,
    none,
    plus,
    product,
    running,
    scalar,
    slope,
    store,
    terms,
    through_angle,
    total,
)

TILE = 1024  # pairs a program, four to a thread. Smaller in tests.
WARPS = 8
WAYS = 4  # blocks merged at a time
SPAN = tl.constexpr(256)  # how many tiles' sums are added at a time: one to a thread


@triton.jit
def _over_tiles(sums, start, stop, linear):
    """The sum of what tiles start <= t < stop keep."""
    empty = none(sums.dtype.element_ty, linear)
    joined = tl.zeros((SPAN,), sums.dtype.element_ty) + empty
    for chunk in range(start, stop, SPAN):
        t = chunk + tl.arange(0, SPAN)
        joined = plus(joined, tl.load(sums + t, t < stop, empty), linear)
    return total(joined, linear)


@triton.jit
def _exponents(c, low, high, scale, room, angular: tl.constexpr):
    """Exponents of these pairs, and whether sums over all pairs are kept as numbers."""
    low, high = tl.load(low).to(c.dtype), tl.load(high).to(c.dtype)
    x, reach = exponents(c, low, high, scalar(scale, c.dtype), angular)
    return x, reach < scalar(room, c.dtype)


@triton.jit
def _keep_totals(totals, up, down, tile, tiles, linear):
    tl.store(totals + tile, total(up, linear))
    tl.store(totals + tiles + tile, total(down, linear))


@kernel
def tile_sums(
    similarity, values, order, labels, low, high, totals, sums, sorted_labels, places, partner_sums, n: tl.int64,
    tiles, room: tl.float64, scale: tl.float64, rank, angular, labelled, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, TILE)
    p = tile * TILE + o
    inside = p < n
    index = tl.load(order + p, inside, 0)
    c = tl.load(similarity + index, inside, 0.0).to(totals.dtype.element_ty)
    if rank:
        x, linear = _exponents(c, low, high, scale, room, False)
        up = terms(x, inside, linear)
        _keep_totals(totals, up, inverses(up, inside, linear), tile, tiles, linear)
    if angular:
        x, linear = _exponents(c, low, high, scale, room, True)
        up = terms(x, inside, linear)
        if labelled:
            value = tl.load(values + p, inside, 0)
            changes = (o > 0) & (value != tl.load(values + p - 1, inside & (o > 0), 0))
            run = tl.cumsum(changes.to(tl.int32), 0)
            label = tl.load(labels + index, inside, 0)
            before, behind, label, place, up = by_labels(label, run, inside, up, linear, True, TILE)
            run = place >> 16
            place = tile * TILE + (place & 0xFFFF)
            tl.store(partner_sums + place, before, inside)
            tl.store(partner_sums + n + place, behind, inside)
            tl.store(sorted_labels + p, label, inside)
            tl.store(places + p, place, inside)
            # From each pair on, up to each pair; and the same without the last run, without the first one.
            empty = none(up.dtype, linear)
            down = inverses(up, inside, linear)
            early = tl.where(run != tl.max(tl.where(inside, run, 0), 0), up, empty)
            up, early = running(flip(up, TILE), flip(early, TILE), linear)
            down, late = running(down, tl.where(run != 0, down, empty), linear)
            tl.store(sums + p, flip(up, TILE), inside)
            tl.store(sums + n + p, flip(early, TILE), inside)
            tl.store(sums + 2 * n + p, down, inside)
            tl.store(sums + 3 * n + p, late, inside)
        else:
            _keep_totals(totals + 2 * tiles, up, inverses(up, inside, linear), tile, tiles, linear)


@triton.jit
def _search(sorted_labels, start, count, label, mask, equal, size):
    """How many of a block's labels are smaller, or no larger if `equal`: bisection by powers of two."""
    found = tl.zeros_like(label)
    step = size
    while step > 0:
        probe = found + step
        here = mask & (probe <= count)
        other = tl.load(sorted_labels + start + probe - 1, here, 0)
        found = tl.where(here & ((other < label) | ((other == label) & equal)), probe, found)
        step = step // 2
    return found


@kernel
def merge_tiles(
    values, low, high, sums, sorted_labels, places, to_sums, to_labels, to_places, partner_sums, n: tl.int64,
    size: tl.int64, room: tl.float64, scale: tl.float64, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    inside = p < n
    block = tile * TILE // size * size
    origin = block // (size * WAYS) * (size * WAYS)
    stop = tl.minimum(origin + size * WAYS, n)
    label = tl.load(sorted_labels + p, inside, 0)
    place = tl.load(places + p, inside, 0)
    value = tl.load(values + place, inside, 0)
    lowest, highest = tl.load(values + origin), tl.load(values + stop - 1)
    before = tl.load(partner_sums + place, inside, 0.0)
    behind = tl.load(partner_sums + n + place, inside, 0.0)
    _, linear = _exponents(before, low, high, scale, room, True)
    empty = none(before.dtype, linear)
    up = tl.zeros_like(before) + empty
    early, down, late = up, up, up
    to = origin + tl.zeros_like(label)
    for start in range(origin, stop, size):
        count = tl.minimum(stop - start, size)
        own = start == block
        if own:
            found = p - start
        else:
            found = _search(sorted_labels, start, count, label, inside, start < block, size)
        to += found
        least, most = tl.load(values + start), tl.load(values + start + count - 1)
        # A run of equal scores may reach over blocks: what of it is in another one is no partner.
        here = sums + start + found
        exists = inside & (found < count)
        more = tl.load(here, exists, empty)
        more_early = tl.load(here + n, exists, empty)
        if start < block:
            before = plus(before, tl.where(value == most, more_early, more), linear)
        up = plus(up, more, linear)
        early = plus(early, tl.where(highest == most, more_early, more), linear)
        here += 2 * n - 1 + own
        exists = inside & (found + own > 0)
        more = tl.load(here, exists, empty)
        more_late = tl.load(here + n, exists, empty)
        if start > block:
            behind = plus(behind, tl.where(value == least, more_late, more), linear)
        down = plus(down, more, linear)
        late = plus(late, tl.where(lowest == least, more_late, more), linear)
    tl.store(partner_sums + place, before, inside)
    tl.store(partner_sums + n + place, behind, inside)
    tl.store(to_labels + to, label, inside)
    tl.store(to_places + to, place, inside)
    tl.store(to_sums + to, up, inside)
    tl.store(to_sums + n + to, early, inside)
    tl.store(to_sums + 2 * n + to, down, inside)
    tl.store(to_sums + 3 * n + to, late, inside)


@triton.jit
def _keep_prefixes(rows, totals, x, p, n, tile, tiles, linear, TILE: tl.constexpr):
    up = terms(x, p < n, linear)
    up, down = running(up, flip(inverses(up, p < n, linear), TILE), linear)
    up = plus(up, _over_tiles(totals, 0, tile, linear), linear)
    down = plus(flip(down, TILE), _over_tiles(totals + tiles, tile + 1, tiles, linear), linear)
    tl.store(rows + p, up, p < n)
    tl.store(rows + n + p, down, p < n)


@kernel
def prefixes(
    similarity, order, low, high, totals, rows, n: tl.int64, tiles, room: tl.float64, scale: tl.float64,
    rank, angular, labelled, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    c = tl.load(similarity + tl.load(order + p, p < n, 0), p < n, 0.0).to(totals.dtype.element_ty)
    if rank:
        x, linear = _exponents(c, low, high, scale, room, False)
        _keep_prefixes(rows, totals, x, p, n, tile, tiles, linear, TILE)
    if angular:
        if labelled == 0:
            x, linear = _exponents(c, low, high, scale, room, True)
            _keep_prefixes(rows + 2 * n, totals + 2 * tiles, x, p, n, tile, tiles, linear, TILE)


@triton.jit
def _alike(values, p, n, way):
    """How far from p on the score stays the same, in one direction."""
    value = tl.load(values + p)
    step = tl.full((), 1, tl.int64)
    more = tl.full((), 1, tl.int32)
    while more > 0:
        q = p + way * step
        exists = (q >= 0) & (q < n)
        more = tl.max((exists & (tl.load(values + q, exists, 0) == value)).to(tl.int32), 0)
        step = step << more
    found = tl.zeros_like(p)
    step = step // 2
    while step > 0:
        q = p + way * (found + step)
        exists = (q >= 0) & (q < n)
        found = tl.where(exists & (tl.load(values + q, exists, 0) == value), found + step, found)
        step = step // 2
    return found


@triton.jit
def _run(values, p, n, ties):
    """First and last position of the run of equal scores that holds p."""
    first, last = p, p
    if ties != ORDINAL:
        first = p - _alike(values, p, n, -1)
        last = p + _alike(values, p, n, 1)
    return first, last


@triton.jit
def _count(values, bound, n, ties):
    """How many positions have a doubled rank of at most `bound`."""
    first, last = _run(values, tl.minimum(tl.maximum(bound >> 1, 0), n - 1), n, ties)
    return count_at_most(first, last, bound, ties)


@triton.jit
def _looked_up(rows, end, start, inside, n, linear):
    empty = none(rows.dtype.element_ty, linear)
    before = tl.load(rows + end - 1, inside & (end > 0), empty)
    return before, tl.load(rows + n + start, inside & (start < n), empty)


@triton.jit
def _objective(x, inside, before, behind, shares, tile, tiles, linear, final):
    """At first each tile's share of Z; the loss and dL/dx - dL/dy once all have left theirs."""
    up = terms(x, inside, linear)
    down = inverses(up, inside, linear)
    loss = scalar(0.0, x.dtype)
    by_x = tl.zeros_like(x)
    if final:
        z = _over_tiles(shares, 0, tiles, linear)
        loss = log_one_plus(z, linear)
        by_x = slope(up, down, before, behind, z, loss, linear)
    else:
        tl.store(shares + tile, total(product(down, before, linear), linear))
    return loss, by_x


@kernel
def partners(
    similarity, values, order, low, high, rows, ends, partner_sums, shares, losses, grads, n: tl.int64, tiles,
    threshold: tl.int64, ties, room: tl.float64, scale: tl.float64, rank_weight: tl.float64, angle_weight: tl.float64,
    rank, angular, labelled, parts, need_grad, final, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    inside = p < n
    dtype: tl.constexpr = losses.dtype.element_ty
    index = tl.load(order + p, inside, 0)
    c = tl.load(similarity + index, inside, 0.0).to(dtype)
    p = tl.minimum(p, n - 1)
    # NaN scores are sorted to the end; the extent of c is NaN if one of them is.
    worst, widest = tl.load(values + n - 1), tl.load(high)
    poison = tl.where((worst != worst) | (widest != widest), float("nan"), 0.0).to(dtype)
    factor = scalar(scale, dtype)

    rank_loss = scalar(0.0, dtype)
    rank_slope = tl.zeros_like(c)
    if rank:
        if ties == DENSE:
            end, start = tl.load(ends + p), tl.load(ends + n + p)
        else:
            first, last = _run(values, p, n, ties)
            ranks = doubled_rank(first, last, ties)
            end, start = _count(values, ranks - threshold, n, ties), _count(values, ranks + (threshold - 1), n, ties)
        x, linear = _exponents(c, low, high, scale, room, False)
        before, behind = _looked_up(rows, end, start, inside, n, linear)
        rank_loss, rank_slope = _objective(x, inside, before, behind, shares, tile, tiles, linear, final)
        weight = scalar(rank_weight, dtype)
        rank_loss, rank_slope = weight * rank_loss + poison, weight * factor * rank_slope + poison
    angle_loss = scalar(0.0, dtype)
    angle_slope = tl.zeros_like(c)
    if angular:
        x, linear = _exponents(c, low, high, scale, room, True)
        if labelled:
            before, behind = tl.load(partner_sums + p), tl.load(partner_sums + n + p)
        else:
            first, last = _run(values, p, n, AVERAGE)
            before, behind = _looked_up(rows + 2 * n, first, last + 1, inside, n, linear)
        shares += tiles
        angle_loss, angle_slope = _objective(x, inside, before, behind, shares, tile, tiles, linear, final)
        weight = scalar(angle_weight, dtype)
        angle_slope = through_angle(c, weight * factor * angle_slope) + poison
        angle_loss = weight * angle_loss + poison
    if final:
        store(
            losses, grads, index, inside, n, rank_loss, rank_slope, angle_loss, angle_slope, tile == 0, parts, need_grad
        )


KERNELS = (tile_sums, merge_tiles, prefixes, partners)
INTEGERS = ("order", "labels", "ends", "sorted_labels", "places", "to_labels", "to_places")
FLOATS = ("similarity", "low", "high", "totals", "rows", "shares", "partner_sums", "sums", "to_sums", "losses", "grads")


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
    by_label = bool(call["angular"] and call["labelled"])

    def scratch(*shape: int, dtype: torch.dtype = losses.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=losses.device)

    values, order = torch.sort(scores, stable=True)
    low, high = torch.aminmax(similarity)
    rows = scratch(4, n)
    tensors = dict(
        similarity=similarity, values=values, order=order, labels=labels, low=low, high=high, rows=rows,
        totals=scratch(4, tiles), shares=scratch(2, tiles), losses=losses, grads=losses if grads is None else grads,
        ends=_dense_ends(values, call["threshold"]) if call["rank"] and call["ties"] == DENSE.value else order,
        partner_sums=scratch(2, n) if by_label else rows,
    )  # fmt: skip
    available = {**call, **tensors, "tiles": tiles, "TILE": TILE, "WAYS": WAYS}

    def run(function: Any, grid: int, **changed: Any) -> None:
        given = {**available, **changed}
        function[(grid,)](**{name: given[name] for name in function.arg_names}, num_warps=WARPS)

    blocks = [
        dict(sums=scratch(4, n * by_label), sorted_labels=whole[0], places=whole[1])
        for whole in scratch(2, 2, n * by_label, dtype=torch.int64)
    ]
    run(tile_sums, tiles, **blocks[0])
    size = TILE
    while by_label and size < n:
        to = dict(zip(("to_sums", "to_labels", "to_places"), blocks[1].values(), strict=True))
        run(merge_tiles, tiles, **blocks[0], **to, size=size)
        blocks.reverse()
        size *= WAYS
    if call["rank"] or not by_label:
        run(prefixes, tiles)
    run(partners, tiles, final=0)
    run(partners, tiles if call["need_grad"] else 1, final=1)


def _dense_ends(values: Tensor, threshold: int) -> Tensor:
    """Where each pair's rank prefix ends and its suffix starts, by ranks that count runs of equal scores."""
    ranks = torch.zeros_like(values, dtype=torch.int64)
    torch.cumsum(values[1:] != values[:-1], 0, out=ranks[1:])
    ranks *= 2
    ends = torch.searchsorted(ranks, ranks - threshold, right=True)
    return torch.stack([ends, torch.searchsorted(ranks, ranks + threshold)])


def variants() -> Iterator[Variant]:
    """What calls compile, for triton_compile: each dtype of each argument once."""
    seen = set()
    for dtype, scores in (("fp32", "fp32"), ("fp32", "fp64"), ("fp32", "i64"), ("fp64", "fp64")):
        pointers = dict.fromkeys(FLOATS, f"*{dtype}") | dict.fromkeys(INTEGERS, "*i64") | dict(values=f"*{scores}")
        for function in KERNELS:
            name = f"pairwise.{function.__name__} {dtype}" + f" {scores}" * ("values" in function.arg_names)
            if name not in seen:
                seen.add(name)
                constants = {k: v for k, v in dict(TILE=TILE, WAYS=WAYS).items() if k in function.arg_names}
                yield Variant(name, function, signature_of(function, **pointers), constants, WARPS)
