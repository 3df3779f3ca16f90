"""How the Triton kernels for many pairs cut the sorted order into tiles, and what a tile tells the others."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_math import join, larger, logarithm, lowest, masked, smaller, total

LIMIT = tl.constexpr(16)  # distinct labels up to which a tile keeps sums for each
# Columns of sums: column 0 is the rank objective's, column 1 + k splits between labels k and k + 1.
COLUMNS = 1 + LIMIT.value
# The four sums of a column, each a pair (m, s).
BEFORE = tl.constexpr(0)  # of x over the tile
BEFORE_LAST_RUN = tl.constexpr(1)  # of x over what precedes the last run that begins in the tile
BEHIND = tl.constexpr(2)  # of y over the tile
FROM_FIRST_RUN = tl.constexpr(3)  # of y from the first run that begins in the tile
SPAN = tl.constexpr(256)  # how many tiles' sums, or pairs of a long pass, are added at a time: one to a thread

SCALARS = [
    *("n", "tiles", "threshold", "ties", "tau", "rank_weight", "angle_weight"),
    *("rank", "angular", "labelled", "parts", "need_grad"),
]
POINTERS = [
    *("similarity", "values", "order", "labels", "table", "distinct", "cs", "sums", "runs", "nans"),
    *("first", "last", "prefix", "suffix", "upper", "lower", "joined", "losses", "grads"),
]
# One compilation for all sizes, alignments and switches.
kernel = triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)


@triton.jit
def slot(sums, column, kind, tiles):
    """Where the tiles' m of one sum of one column begin; their s follow `tiles` behind."""
    return sums + (column * 4 + kind) * 2 * tiles


@triton.jit
def keep(sums, column, kind, tile, tiles, x, mask):
    m, s = masked(x, mask)
    m, s = total(m, s)
    place = slot(sums, column, kind, tiles) + tile
    tl.store(place, m)
    tl.store(place + tiles, s)


@triton.jit
def over_tiles(place, start, stop, tiles):
    """The sum over tiles start <= t < stop of what they keep at `place`."""
    m, s = masked(tl.zeros((SPAN,), place.dtype.element_ty), tl.arange(0, SPAN) < 0)
    for chunk in range(start, stop, SPAN):
        t = chunk + tl.arange(0, SPAN)
        mask = t < stop
        other = tl.load(place + t, mask, lowest(m.dtype))
        m, s = join(m, s, other, tl.load(place + tiles + t, mask, 0.0))
    return total(m, s)


@triton.jit
def keep_partners(lower, joined, p, inside, y, pm, ps, tile, tiles):
    """Each j's share of Z as a logarithm, and their sum over the tile."""
    tl.store(lower + p, y + logarithm(pm, ps), inside)
    m, s = total(tl.where(inside, y + pm, lowest(y.dtype)), tl.where(inside, ps, 0.0))
    tl.store(joined + tile, m)
    tl.store(joined + tiles + tile, s)


@triton.jit
def runs_of_tile(values, runs, tile, n, tiles, TILE: tl.constexpr):
    """Where the run of equal scores of each position begins and ends.

    Returns: begin and finish within the tile, -1 and TILE where a run began before it and ends behind it;
    where, in the whole order, the run that reaches in began and the run behind the one that reaches out
    begins; and the number of each position's run.
    """
    before = tl.full((SPAN,), 0, tl.int64)
    behind = n + tl.full((SPAN,), 0, tl.int64)
    number = tl.full((SPAN,), 0, tl.int64)
    for chunk in range(0, tiles, SPAN):
        t = chunk + tl.arange(0, SPAN)
        before = tl.maximum(before, tl.load(runs + tiles + t, t < tile, 0))
        behind = tl.minimum(behind, tl.load(runs + t, (t > tile) & (t < tiles), n))
        number += tl.load(runs + tiles * 2 + t, t < tile, 0)
    o = tl.arange(0, TILE)
    p = tile * TILE + o
    changes = changes_at(values, p, n)
    begin = tl.associative_scan(tl.where(changes, o, -1), 0, larger)
    number_here = tl.sum(number, 0) + tl.cumsum(changes.to(tl.int32), 0) - 1
    # Reversed: the end of a run is the nearest position whose successor begins one.
    back = TILE - 1 - o
    next_p = tile * TILE + back + 1
    ends = (next_p >= n) | changes_at(values, next_p, n)
    finish = tl.associative_scan(tl.where(ends, back, TILE), 0, smaller)
    return begin, tl.gather(finish, back, 0), tl.max(before, 0), tl.min(behind, 0), number_here


@triton.jit
def changes_at(values, p, n):
    """Whether a run of equal scores begins at p."""
    value = tl.load(values + p, p < n, 0)
    return (p < n) & ((p == 0) | (value != tl.load(values + p - 1, (p < n) & (p > 0), 0)))
