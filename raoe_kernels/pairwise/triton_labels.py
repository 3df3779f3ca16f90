"""The angular objective's partners in Triton for many pairs: the labels there are, the sums over larger ones.

Up to LIMIT distinct labels, tiles keep a sum for each boundary between two of them. With more there is no
room for that, so a tile makes its own pass over all pairs for every label it holds: right, but O(B^2) where
all differ. Which of the two it is, the device decides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_math import (
    angle,
    at,
    exponent,
    join,
    logarithm,
    lowest,
    masked,
    running,
    scalar,
    total,
)
from .triton_tiles import (
    BEFORE,
    BEFORE_LAST_RUN,
    BEHIND,
    FROM_FIRST_RUN,
    LIMIT,
    SPAN,
    keep_partners,
    kernel,
    over_tiles,
    runs_of_tile,
    slot,
)

ENTRIES = tl.constexpr(32)  # room for LIMIT + 1 labels and their number
COUNT = tl.constexpr(31)  # where in it the number stands: LIMIT + 1 means "more"


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
    k = tl.full((), 1, tl.int64)
    while (k <= LIMIT) & (cur < highest):
        following = highest
        for start in range(0, count, TILE):
            p = start + tl.arange(0, TILE)
            label = tl.load(distinct + p, p < count, 0)
            following = tl.minimum(following, tl.min(tl.where((p < count) & (label > cur), label, highest), 0))
        cur = following
        tl.store(table + k, cur)
        k += 1
    tl.store(table + COUNT, k)


@triton.jit
def _over_pairs(similarity, cs, order, labels, start, stop, cur, scale, sign):
    """The sum of exp(x) over sorted positions with a label above cur (sign 1), or of exp(y) with one below
    (-1)."""
    dtype: tl.constexpr = cs.dtype.element_ty
    origin = angle(tl.load(similarity).to(dtype))
    m, s = masked(tl.zeros((SPAN,), dtype), tl.arange(0, SPAN) < 0)
    for chunk in range(start, stop, SPAN):
        p = chunk + tl.arange(0, SPAN)
        mask = p < stop
        label = tl.load(labels + tl.load(order + p, mask, 0), mask, 0)
        counted = tl.where(sign > 0, (label > cur).to(tl.int32), (label < cur).to(tl.int32)) != 0
        x = exponent(scale, angle(tl.load(cs + p, mask, 0.0)), origin)
        other, other_s = masked(-sign * x, mask & counted)
        m, s = join(m, s, other, other_s)
    return total(m, s)


@triton.jit
def _from_other_tiles(sums, k, tile, coming, following, exists_above, exists_under, column, tiles, TILE: tl.constexpr):
    """left, early: sums of x before the tile, and before the run that reaches into it; right, late: sums of y
    behind the tile, and behind the run that reaches out of it."""
    place = slot(sums, 1 + k, BEFORE, tiles)
    begun = coming // TILE
    stop = tl.where(exists_above, tile, 0)
    cut = tl.minimum(begun, stop)
    early, early_s = over_tiles(place, 0, cut, tiles)
    left, left_s = over_tiles(place, cut, stop, tiles)
    left, left_s = join(early, early_s, left, left_s)
    place = slot(sums, 1 + k, BEFORE_LAST_RUN, tiles) + begun
    early, early_s = join(
        early,
        early_s,
        tl.load(place, begun < stop, lowest(early.dtype)),
        tl.load(place + tiles, begun < stop, 0.0),
    )
    place = slot(sums, column, BEHIND, tiles)
    stop = tl.where(exists_under, tiles, 0)
    ended = following // TILE
    late, late_s = over_tiles(place, ended + 1, stop, tiles)
    right, right_s = over_tiles(place, tile + 1, tl.minimum(ended + 1, stop), tiles)
    right, right_s = join(late, late_s, right, right_s)
    place = slot(sums, column, FROM_FIRST_RUN, tiles) + ended
    late, late_s = join(
        late,
        late_s,
        tl.load(place, ended < stop, lowest(late.dtype)),
        tl.load(place + tiles, ended < stop, 0.0),
    )
    return left, left_s, early, early_s, right, right_s, late, late_s


@kernel
def label_partners(
    similarity, values, order, labels, table, cs, sums, runs, upper, lower, joined, n, tiles, tau: tl.float64,
    labelled, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, TILE)
    origin = tile * TILE
    p = origin + o
    inside = p < n
    dtype: tl.constexpr = cs.dtype.element_ty
    begin, finish, coming, following, _ = runs_of_tile(values, runs, tile, n, tiles, TILE)
    scale = scalar(tau, dtype)
    x = -exponent(scale, angle(tl.load(cs + p, inside, 0.0)), angle(tl.load(similarity).to(dtype)))
    flags = labelled + tl.zeros((TILE,), tl.int32)
    free = flags == 0  # no label restricts a pair
    label = tl.load(labels + tl.load(order + p, inside, 0), inside & (flags != 0), 0)
    classes = tl.load(table + COUNT, labelled != 0, 0)
    cur = _smallest(label, inside)
    highest = _largest(label, inside)
    pm = tl.full((TILE,), lowest(dtype), dtype)
    ps = tl.zeros_like(x)
    qm = pm
    qs = ps
    more = tl.full((), 1, tl.int32)
    while more > 0:
        if classes > LIMIT:
            early, early_s = _over_pairs(similarity, cs, order, labels, 0, coming, cur, scale, 1)
            left, left_s = _over_pairs(similarity, cs, order, labels, coming, origin, cur, scale, 1)
            left, left_s = join(early, early_s, left, left_s)
            late, late_s = _over_pairs(similarity, cs, order, labels, following, n, cur, scale, -1)
            right, right_s = _over_pairs(similarity, cs, order, labels, origin + TILE, following, cur, scale, -1)
            right, right_s = join(late, late_s, right, right_s)
        else:
            entry = tl.arange(0, ENTRIES)
            smaller_ones = tl.load(table + entry, entry < classes, cur) < cur
            k = tl.sum(smaller_ones.to(tl.int64), 0)
            # Larger labels lie behind boundary k, smaller ones before boundary k - 1; without labels there is
            # one column for both.
            above = tl.where(labelled != 0, k + 1 - classes, -1) < 0
            under = tl.where(labelled != 0, k, 1) > 0
            left, left_s, early, early_s, right, right_s, late, late_s = _from_other_tiles(
                sums, k, tile, coming, following, above, under, tl.maximum(k, 1), tiles, TILE
            )
        m, s = masked(x, inside & (free | (label > cur)))
        m, s = running(m, s)
        m, s = at(m, s, begin - 1, TILE)
        m, s = join(m, s, tl.where(begin < 0, early, left), tl.where(begin < 0, early_s, left_s))
        pm = tl.where(free | (label == cur), m, pm)
        ps = tl.where(free | (label == cur), s, ps)

        m, s = masked(-x, inside & (free | (label < cur)))
        m, s = running(tl.gather(m, TILE - 1 - o, 0), tl.gather(s, TILE - 1 - o, 0))
        m, s = at(m, s, TILE - 2 - finish, TILE)
        m, s = join(m, s, tl.where(finish == TILE, late, right), tl.where(finish == TILE, late_s, right_s))
        qm = tl.where(free | (label == cur), m, qm)
        qs = tl.where(free | (label == cur), s, qs)
        more = ((labelled != 0) & (cur < highest)).to(tl.int32)
        cur = tl.min(tl.where(inside & (label > cur), label, highest), 0)
    tl.store(upper + n + p, x + logarithm(qm, qs), inside)
    keep_partners(lower + n, joined + 2 * tiles, p, inside, -x, pm, ps, tile, tiles)
