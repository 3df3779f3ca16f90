"""The losses in Triton for any number of pairs: torch.sort, then scans over fixed tiles, about six launches in all.

    distinct_labels, label_table   the smallest LIMIT + 1 distinct labels, found on the device
    tile_sums       each tile by itself: where its runs of equal scores begin, its share of every prefix and suffix sum
    scan_tiles      each tile with what the tiles before and behind it add: the prefix and suffix sums, and the partners
                    of the angular objective
    rank_partners   each rank pair's partners, looked up in those sums
    finish          the loss, and the gradient in the caller's order

A tile adds up the tiles before it by itself, in a fixed order: results are equal from run to run. That is one read a
tile and sum, so (B / TILE)^2 in all: 2^18 at B = 2^20. Nothing here has a shape that depends on data, and no value is
read on the host.

Up to LIMIT distinct labels a tile adds up one number a tile and label. With more there is no room for those, so a
tile makes its own pass over all pairs for every label it holds: right, but O(B^2) where labels are all different.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from raoe_kernels.pairwise.triton_math import (
    DENSE,
    ORDINAL,
    TIES,
    angle,
    at,
    count_at_most,
    doubled_rank,
    exponent,
    join,
    larger,
    log_one_plus,
    logarithm,
    lowest,
    masked,
    running,
    scalar,
    smaller,
    through_angle,
    total,
)

TILE = 2048  # pairs a program; eight to a thread. Smaller in tests.
WARPS = 8
LIMIT = tl.constexpr(16)
ENTRIES = tl.constexpr(32)  # room for LIMIT + 1 labels and their number
COUNT = tl.constexpr(31)  # where in it the number stands: LIMIT + 1 means "more"
COLUMNS = 1 + LIMIT.value  # sums a tile keeps: column 0 is the rank objective's, 1 + k splits between labels k and k + 1
# The four sums of a column, each a pair (m, s).
BEFORE, BEFORE_LAST_RUN, BEHIND, FROM_FIRST_RUN = (tl.constexpr(k) for k in range(4))

SCALARS = ["n", "threshold", "ties", "tau", "rank_weight", "angle_weight", "rank", "angular", "labelled", "parts",
           "need_grad", "tiles"]  # fmt: skip
POINTERS = ["similarity", "values", "order", "labels", "table", "distinct", "cs", "sums", "runs", "nans", "first", "last",
            "prefix", "suffix", "upper", "lower", "joined", "losses", "grads"]  # fmt: skip
kernel = triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)


@triton.jit
def _smallest(label, inside):
    return tl.min(tl.where(inside, label, 0x7FFFFFFFFFFFFFFF), 0)


@triton.jit
def _largest(label, inside):
    return tl.max(tl.where(inside, label, -0x8000000000000000), 0)


@kernel
def distinct_labels(labels, distinct, n, TILE: tl.constexpr):
    """The smallest LIMIT + 1 distinct labels of each tile, the last repeated where there are fewer."""
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    inside = p < n
    label = tl.load(labels + p, inside, 0)
    highest = _largest(label, inside)
    cur = _smallest(label, inside)
    for k in range(LIMIT + 1):
        tl.store(distinct + tile * (LIMIT + 1) + k, cur)
        cur = tl.min(tl.where(inside & (label > cur), label, highest), 0)


@kernel
def label_table(distinct, table, tiles, TILE: tl.constexpr):
    """The same of all tiles, and how many there are."""
    count = tiles.to(tl.int64) * (LIMIT + 1)
    highest = tl.full((), -0x8000000000000000, tl.int64)
    cur = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, count, TILE):
        p = start + tl.arange(0, TILE)
        label = tl.load(distinct + p, p < count, 0)
        highest = tl.maximum(highest, _largest(label, p < count))
        cur = tl.minimum(cur, _smallest(label, p < count))
    tl.store(table, cur)
    k = 1
    while (k <= LIMIT) & (cur < highest):
        following = highest
        for start in range(0, count, TILE):
            p = start + tl.arange(0, TILE)
            label = tl.load(distinct + p, p < count, 0)
            following = tl.minimum(following, tl.min(tl.where((p < count) & (label > cur), label, highest), 0))
        cur = following
        tl.store(table + k, cur)
        k += 1
    tl.store(table + COUNT, k.to(tl.int64))


@triton.jit
def _slot(sums, column, kind, tiles):
    """Where the tiles' m of one sum of one column begin; their s follow `tiles` behind."""
    return sums + (column * 4 + kind) * 2 * tiles


@triton.jit
def _keep(sums, column, kind, tile, tiles, x, mask):
    m, s = masked(x, mask)
    m, s = total(m, s)
    place = _slot(sums, column, kind, tiles) + tile
    tl.store(place, m)
    tl.store(place + tiles, s)


@triton.jit
def _over_tiles(place, start, stop, tiles, TILE: tl.constexpr):
    """The sum over tiles start <= t < stop of what they keep at `place`."""
    m, s = masked(tl.zeros((TILE,), place.dtype.element_ty), tl.arange(0, TILE) < 0)
    for chunk in range(start // TILE * TILE, stop, TILE):
        t = chunk + tl.arange(0, TILE)
        mask = (t >= start) & (t < stop)
        other = tl.load(place + t, mask, lowest(m.dtype))
        m, s = join(m, s, other, tl.load(place + tiles + t, mask, 0.0))
    return total(m, s)


@kernel
def tile_sums(
    similarity, values, order, labels, table, cs, sums, runs, nans, n, tiles, tau: tl.float64, rank, angular, labelled,
    TILE: tl.constexpr,
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

    changes = inside & ((p == 0) | (value != tl.load(values + p - 1, inside & (p > 0), 0)))
    start = tl.min(tl.where(changes, p, n), 0)
    end = tl.max(tl.where(changes, p, -1), 0)
    tl.store(runs + tile, start)
    tl.store(runs + tiles + tile, end)
    tl.store(runs + tiles * 2 + tile, tl.sum(changes.to(tl.int64), 0))

    scale = scalar(tau, dtype)
    if rank:
        x = exponent(scale, c, tl.load(similarity).to(dtype))
        _keep(sums, 0, BEFORE, tile, tiles, x, inside)
        _keep(sums, 0, BEHIND, tile, tiles, -x, inside)
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
            _keep(sums, 1 + k, BEFORE, tile, tiles, x, above)
            _keep(sums, 1 + k, BEFORE_LAST_RUN, tile, tiles, x, above & (p < end))
            _keep(sums, 1 + k, BEHIND, tile, tiles, -x, under)
            _keep(sums, 1 + k, FROM_FIRST_RUN, tile, tiles, -x, under & (p >= start))


@triton.jit
def _over_pairs(similarity, cs, order, labels, start, stop, cur, scale, sign, TILE: tl.constexpr):
    """The sum of exp(x) over sorted positions with a label above cur (sign 1), or of exp(y) with one below (-1)."""
    dtype: tl.constexpr = cs.dtype.element_ty
    origin = angle(tl.load(similarity).to(dtype))
    m, s = masked(tl.zeros((TILE,), dtype), tl.arange(0, TILE) < 0)
    for chunk in range(start, stop, TILE):
        p = chunk + tl.arange(0, TILE)
        mask = p < stop
        label = tl.load(labels + tl.load(order + p, mask, 0), mask, 0)
        counted = tl.where(sign > 0, (label > cur).to(tl.int32), (label < cur).to(tl.int32)) != 0
        x = exponent(scale, angle(tl.load(cs + p, mask, 0.0)), origin)
        other, other_s = masked(-sign * x, mask & counted)
        m, s = join(m, s, other, other_s)
    return total(m, s)


@triton.jit
def _keep_partners(lower, joined, p, inside, y, pm, ps, tile, tiles):
    """Each j's share of Z as a logarithm, and their sum over the tile."""
    tl.store(lower + p, y + logarithm(pm, ps), inside)
    m, s = total(tl.where(inside, y + pm, lowest(y.dtype)), tl.where(inside, ps, 0.0))
    tl.store(joined + tile, m)
    tl.store(joined + tiles + tile, s)


@kernel
def scan_tiles(
    similarity, values, order, labels, table, cs, sums, runs, first, last, prefix, suffix, upper, lower, joined, n, tiles,
    ties, tau: tl.float64, rank, angular, labelled, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, TILE)
    origin = tile * TILE
    p = origin + o
    inside = p < n
    dtype: tl.constexpr = cs.dtype.element_ty
    c = tl.load(cs + p, inside, 0.0)

    # The run of equal scores that reaches into this tile begins at `coming`; the one behind those that begin here, at
    # `following`.
    coming = tl.full((TILE,), 0, tl.int64)
    following = n + tl.full((TILE,), 0, tl.int64)
    number = tl.full((TILE,), 0, tl.int64)
    for chunk in range(0, tiles, TILE):
        t = chunk + o
        coming = tl.maximum(coming, tl.load(runs + tiles + t, t < tile, 0))
        following = tl.minimum(following, tl.load(runs + t, (t > tile) & (t < tiles), n))
        number += tl.load(runs + tiles * 2 + t, t < tile, 0)
    coming = tl.max(coming, 0)
    following = tl.min(following, 0)

    value = tl.load(values + p, inside, 0)
    changes = inside & ((p == 0) | (value != tl.load(values + p - 1, inside & (p > 0), 0)))
    begin = tl.associative_scan(tl.where(changes, p, coming), 0, larger)
    # Reversed: the end of a run is the nearest position whose successor differs.
    back = origin + TILE - 1 - o
    next_value = tl.load(values + back + 1, back + 1 < n, 0)
    ends = (back + 1 >= n) | (tl.load(values + back, back < n, 0) != next_value)
    finish = tl.associative_scan(tl.where(ends, tl.minimum(back, n - 1), following - 1), 0, smaller)
    finish = tl.gather(finish, TILE - 1 - o, 0)
    if ties == DENSE:  # by the number of the run: `first` says each position's run, `last` each run's last position
        number_here = tl.sum(number, 0) + tl.cumsum(changes.to(tl.int64), 0) - 1
        tl.store(first + p, number_here, inside)
        tl.store(last + number_here, p, inside & (p == finish))
    else:
        tl.store(first + p, tl.where(ties == ORDINAL, p, begin), inside)
        tl.store(last + p, tl.where(ties == ORDINAL, p, finish), inside)

    scale = scalar(tau, dtype)
    if rank:
        x = exponent(scale, c, tl.load(similarity).to(dtype))
        m, s = masked(x, inside)
        m, s = running(m, s)
        other, other_s = _over_tiles(_slot(sums, 0, BEFORE, tiles), 0, tile, tiles, TILE)
        m, s = join(m, s, other + tl.zeros_like(m), other_s + tl.zeros_like(s))
        tl.store(prefix + p, m, inside)
        tl.store(prefix + n + p, s, inside)
        y = -exponent(scale, tl.load(cs + back, back < n, 0.0), tl.load(similarity).to(dtype))
        m, s = masked(y, back < n)
        m, s = running(m, s)
        other, other_s = _over_tiles(_slot(sums, 0, BEHIND, tiles), tile + 1, tiles, tiles, TILE)
        m, s = join(m, s, other + tl.zeros_like(m), other_s + tl.zeros_like(s))
        tl.store(suffix + back, m, back < n)
        tl.store(suffix + n + back, s, back < n)

    if angular:
        x = -exponent(scale, angle(c), angle(tl.load(similarity).to(dtype)))
        flags = labelled + tl.zeros((TILE,), tl.int32)
        free = flags == 0
        label = tl.load(labels + tl.load(order + p, inside, 0), inside & (flags != 0), 0)
        classes = tl.load(table + COUNT, labelled != 0, 2)
        cur = _smallest(label, inside)
        highest = _largest(label, inside)
        pm = tl.full((TILE,), lowest(dtype), dtype)
        ps = tl.zeros_like(c)
        qm = pm
        qs = ps
        more = tl.full((), 1, tl.int32)
        while more > 0:
            # What other tiles add to the sums of this label: up to where the run that comes in began (`early`), and up
            # to this tile; likewise behind.
            if classes > LIMIT:
                early, early_s = _over_pairs(similarity, cs, order, labels, 0, coming, cur, scale, 1, TILE)
                left, left_s = _over_pairs(similarity, cs, order, labels, coming, origin, cur, scale, 1, TILE)
                left, left_s = join(early, early_s, left, left_s)
                late, late_s = _over_pairs(similarity, cs, order, labels, following, n, cur, scale, -1, TILE)
                right, right_s = _over_pairs(similarity, cs, order, labels, origin + TILE, following, cur, scale, -1, TILE)
                right, right_s = join(late, late_s, right, right_s)
            else:
                entry = tl.arange(0, ENTRIES)
                known = tl.load(table + entry, entry < tl.where(labelled != 0, classes, 0), cur)
                k = tl.sum((known < cur).to(tl.int64), 0)
                begun = coming // TILE
                stop = tl.where(k < classes - 1, tile, 0)
                left, left_s = _over_tiles(_slot(sums, 1 + k, BEFORE, tiles), 0, stop, tiles, TILE)
                early, early_s = _over_tiles(_slot(sums, 1 + k, BEFORE, tiles), 0, tl.minimum(begun, stop), tiles, TILE)
                place = _slot(sums, 1 + k, BEFORE_LAST_RUN, tiles) + begun
                exists = begun < stop
                early, early_s = join(
                    early, early_s, tl.load(place, exists, lowest(dtype)), tl.load(place + tiles, exists, 0.0)
                )
                k = tl.where(labelled != 0, k, 1)
                behind = following // TILE
                stop = tl.where(k > 0, tiles, 0)
                column = tl.maximum(k, 1)
                right, right_s = _over_tiles(_slot(sums, column, BEHIND, tiles), tile + 1, stop, tiles, TILE)
                late, late_s = _over_tiles(_slot(sums, column, BEHIND, tiles), behind + 1, stop, tiles, TILE)
                place = _slot(sums, column, FROM_FIRST_RUN, tiles) + behind
                exists = (following < n) & (k > 0)
                late, late_s = join(
                    late, late_s, tl.load(place, exists, lowest(dtype)), tl.load(place + tiles, exists, 0.0)
                )

            m, s = masked(x, inside & (free | (label > cur)))
            m, s = running(m, s)
            m, s = at(m, s, (begin - origin - 1).to(tl.int32), TILE)
            m, s = join(m, s, tl.where(begin < origin, early, left), tl.where(begin < origin, early_s, left_s))
            pm = tl.where(free | (label == cur), m, pm)
            ps = tl.where(free | (label == cur), s, ps)

            m, s = masked(-x, inside & (free | (label < cur)))
            m, s = running(tl.gather(m, TILE - 1 - o, 0), tl.gather(s, TILE - 1 - o, 0))
            beyond = finish >= origin + TILE
            m, s = at(m, s, (origin + TILE - 2 - finish).to(tl.int32), TILE)
            m, s = join(m, s, tl.where(beyond, late, right), tl.where(beyond, late_s, right_s))
            qm = tl.where(free | (label == cur), m, qm)
            qs = tl.where(free | (label == cur), s, qs)
            more = ((labelled != 0) & (cur < highest)).to(tl.int32)
            cur = tl.min(tl.where(inside & (label > cur), label, highest), 0)
        tl.store(upper + n + p, x + logarithm(qm, qs), inside)
        _keep_partners(lower + n, joined + 2 * tiles, p, inside, -x, pm, ps, tile, tiles)


@triton.jit
def _count(first, last, bound, n, runs, ties):
    """How many positions have a doubled rank of at most `bound`."""
    middle = tl.minimum(tl.maximum(bound >> 1, 0), n - 1)
    if ties == DENSE:
        count = tl.load(last + tl.minimum(middle, runs - 1)).to(tl.int64) + 1
        count = tl.where(bound < 0, 0, count)
    else:
        count = count_at_most(
            tl.load(first + middle).to(tl.int64), tl.load(last + middle).to(tl.int64), bound, ties
        )
    return count


@kernel
def rank_partners(
    similarity, cs, first, last, prefix, suffix, upper, lower, joined, n, tiles, threshold, ties, tau: tl.float64,
    TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    p = tile * TILE + tl.arange(0, TILE)
    inside = p < n
    dtype: tl.constexpr = cs.dtype.element_ty
    begin = tl.load(first + p, inside, 0).to(tl.int64)
    ranks = tl.where(
        ties == DENSE, 2 * begin, doubled_rank(begin, tl.load(last + p, inside, 0).to(tl.int64), ties)
    )
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
    _keep_partners(lower, joined, p, inside, -x, pm, ps, tile, tiles)


@triton.jit
def _loss(joined, tiles, TILE: tl.constexpr):
    m, s = _over_tiles(joined, 0, tiles, tiles, TILE)
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
    poisoned = tl.zeros((TILE,), tl.int32)
    for chunk in range(0, tiles, TILE):
        t = chunk + tl.arange(0, TILE)
        poisoned = tl.maximum(poisoned, tl.load(nans + t, t < tiles, 0))
    poison = tl.where(tl.max(poisoned, 0) > 0, float("nan"), 0.0).to(dtype)
    scale = scalar(tau, dtype)

    rank_loss = scalar(0.0, dtype)
    rank_slope = tl.zeros_like(c)
    if rank:
        loss = _loss(joined, tiles, TILE)
        weight = scalar(rank_weight, dtype)
        rank_loss = weight * loss + poison
        if need_grad:
            rank_slope = tl.exp(tl.load(upper + p, inside, 0.0) - loss) - tl.exp(tl.load(lower + p, inside, 0.0) - loss)
            rank_slope = weight * scale * rank_slope + poison
    angle_loss = scalar(0.0, dtype)
    angle_slope = tl.zeros_like(c)
    if angular:
        loss = _loss(joined + 2 * tiles, tiles, TILE)
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


def launch(
    similarity: Tensor, scores: Tensor, labels: Tensor, losses: Tensor, grads: Tensor | None, call: dict[str, Any]
) -> None:
    """Fill losses (rows,) and grads (rows, B); `call` as triton_kernels.arguments makes it."""
    n = call["n"]
    tiles = triton.cdiv(n, TILE)

    def scratch(*shape: int, dtype: torch.dtype = losses.dtype) -> Tensor:
        return losses.new_empty(shape, dtype=dtype)

    values, order = torch.sort(scores, stable=True)
    places = torch.int32 if n < 1 << 30 else torch.int64
    first, last = scratch(2, n, dtype=places)
    cs, prefix, suffix, upper, lower = scratch(n), *scratch(4, 2, n)
    tensors = dict(
        similarity=similarity, values=values, order=order, labels=labels, losses=losses, cs=cs, first=first, last=last,
        prefix=prefix, suffix=suffix, upper=upper, lower=lower, grads=losses if grads is None else grads,
        table=scratch(ENTRIES.value, dtype=torch.int64), sums=scratch(COLUMNS, 4, 2, tiles),
        distinct=scratch(tiles, LIMIT.value + 1, dtype=torch.int64), runs=scratch(3, tiles, dtype=torch.int64),
        nans=scratch(tiles, dtype=torch.int32), joined=scratch(2, 2, tiles),
    )  # fmt: skip

    def run(kernel: Any, grid: int) -> None:
        available = {**tensors, **call, "tiles": tiles}
        kernel[(grid,)](**{k: available[k] for k in kernel.arg_names if k != "TILE"}, TILE=TILE, num_warps=WARPS)

    if call["angular"] and call["labelled"]:
        run(distinct_labels, tiles)
        run(label_table, 1)
    run(tile_sums, tiles)
    run(scan_tiles, tiles)
    if call["rank"]:
        run(rank_partners, tiles)
    run(finish, tiles if call["need_grad"] else 1)
