"""Triton functions that process one block of pairs in registers: sort keys, searches for ranks, sums over labels."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_math import DENSE, count_at_most, empty_sum, inverses, log_add, plus, running


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def _bit_or(a, b):
    return a | b


@triton.jit
def flip(x, BLOCK: tl.constexpr):
    return tl.gather(x, BLOCK - 1 - tl.arange(0, BLOCK), 0)


@triton.jit
def at(x, index, empty, BLOCK: tl.constexpr):
    """Return element `index` of x, or `empty` if the index is out of range."""
    in_range = (index >= 0) & (index < BLOCK)
    return tl.where(in_range, tl.gather(x, tl.minimum(tl.maximum(index, 0), BLOCK - 1), 0), empty)


@triton.jit
def count_below(ascending, bound, BLOCK: tl.constexpr):
    """For each bound, return the number of elements of a sorted block that are below the bound, found by bisection."""
    count = tl.zeros_like(bound).to(tl.int32)
    step = BLOCK
    while step > 0:
        probe = count + step
        value = tl.gather(ascending, tl.minimum(probe, BLOCK) - 1, 0)
        count = tl.where((probe <= BLOCK) & (value < bound), probe, count)
        step = step // 2
    return count


@triton.jit
def order_key(scores, p, in_batch, floating, BLOCK: tl.constexpr):
    """Return int32 keys that sort like the scores, and whether any score is NaN. 64-bit scores are passed as int64.
    `floating` is true if these int64 numbers are the bits of float64 scores."""
    if scores.dtype.element_ty == tl.float32:
        # Convert float bits to an integer of the same order, with -0.0 equal to 0.0.
        bits = tl.load(scores + p, in_batch, 0.0).to(tl.int32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(bits == -0x80000000, 0, bits)
        key = tl.where(in_batch, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    else:
        bits = tl.load(scores + p, in_batch, 0)
        is_float = (floating + tl.zeros_like(p)) != 0
        nan = is_float & ((bits & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000)
        bits = tl.where(is_float & (bits == -0x8000000000000000), 0, bits)
        bits = tl.where(is_float, bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF), bits)
        bits = tl.where(in_batch, bits, 0x7FFFFFFFFFFFFFFF)
        key = count_below(tl.sort(bits), bits, BLOCK)
    return key, tl.max(nan.to(tl.int32), 0)


@triton.jit
def count_ranks(first, last, number, bound, ties, n, BLOCK: tl.constexpr):
    """Return the number of positions whose doubled rank (2 x rank, an integer under all tie rules) is <= `bound`."""
    middle = tl.minimum(tl.maximum(bound >> 1, 0), n - 1)
    count = count_at_most(tl.gather(first, middle, 0), tl.gather(last, middle, 0), bound, ties)
    if ties == DENSE:
        count = count_below(2 * number, bound + 1, BLOCK)
    return count


@triton.jit
def between(up, down, end, start, linear, BLOCK: tl.constexpr):
    """Return the sums of `up` over positions < end, and of `down` over positions >= start."""
    before, behind = running(up, flip(down, BLOCK), linear)
    empty = empty_sum(up.dtype, linear)
    return at(before, end - 1, empty, BLOCK), at(behind, BLOCK - 1 - start, empty, BLOCK)


# ---- Labels, bit by bit ----
#
# l_i > l_j if and only if l_i has a 1 at the highest bit where l_i and l_j differ. So for every bit, the pairs are
# grouped by the higher bits. Within a group, in the order of the scores, pairs whose bit is 0 read sums over pairs
# whose bit is 1, and vice versa. A scan carries three numbers: the group's sum; this sum without the last run (`seen`),
# because equal scores are not compared; and flags. In the flags, bit 0 marks the beginning of a run, and bit 1 marks
# the beginning of a group. Bits 2 to 15 count the group's elements whose label bit is 1, and bits 16 and up count those
# whose bit is 0.


@triton.jit
def _append(sum_a, seen_a, a, back_a, unseen_a, u, sum_b, seen_b, b, back_b, unseen_b, v):
    sum_a, a = tl.where((b & 2) != 0, 0.0, sum_a), tl.where((b & 2) != 0, 0, a)
    back_a, u = tl.where((v & 2) != 0, 0.0, back_a), tl.where((v & 2) != 0, 0, u)
    seen = tl.where((b & 1) != 0, sum_a + seen_b, seen_a)
    unseen = tl.where((v & 1) != 0, back_a + unseen_b, unseen_a)
    return sum_a + sum_b, seen, ((a & -4) + b) | (a & 3), back_a + back_b, unseen, ((u & -4) + v) | (u & 3)


@triton.jit
def _log_appended(sums, seen, b, empty, BLOCK: tl.constexpr):
    """Compute one direction of the scan by doubling, for sums stored as logarithms (see triton_math._log_running)."""
    q = tl.arange(0, BLOCK)
    reach = 1
    while reach < BLOCK:
        source = tl.maximum(q - reach, 0)
        same_group = (q >= reach) & ((b & 2) == 0)
        sum_a = tl.where(same_group, tl.gather(sums, source, 0), empty)
        a = tl.where(same_group, tl.gather(b, source, 0), 0)
        seen_a = tl.where(q >= reach, tl.gather(seen, source, 0), empty)
        seen = tl.where((b & 1) != 0, log_add(sum_a, seen), seen_a)
        sums, b = log_add(sum_a, sums), ((a & -4) + b) | (a & 3)
        reach *= 2
    return seen, b


@triton.jit
def _partition(zero, flags, marks, BLOCK: tl.constexpr):
    """For each place in a new order, return the current position of the element that moves there. In each group,
    elements whose bit is 0 (where `zero` is 1) come first."""
    q = tl.arange(0, BLOCK)
    zeros, ones = flags >> 16, (flags >> 2) & 0x3FFF  # counts in the group, up to this element
    of_group = zeros + (marks >> 16) - zero
    place = zeros + ones - 1
    all_zeros = tl.cumsum(zero, 0)
    to_one = place >= of_group
    goal = tl.where(to_one, q - all_zeros - ones + place - of_group + 1, all_zeros - zeros + place)
    source = tl.zeros_like(q)
    step = BLOCK // 2
    while step > 0:
        probe = source + step
        count = tl.gather(all_zeros, probe - 1, 0)
        count = tl.where(to_one, probe - count, count)
        source = tl.where(count <= goal, probe, source)
        step = step // 2
    return source


@triton.jit
def by_labels(label, first, in_batch, up, linear, BLOCK: tl.constexpr):
    """Return two sums for each pair. The first is the sum of exp(x), passed as `up`, over pairs with larger labels in
    earlier runs of equal scores. The second is the sum of exp(-x) over pairs with smaller labels in later runs.

    The first position of a run, `first` (below 2^15), identifies the run. The function returns four arrays in the same
    new order: both sums, first << 16 | position, and `up`. `position` is an element's index in the argument tensors.
    Elements whose `in_batch` is false come last.
    """
    q = tl.arange(0, BLOCK)
    empty = empty_sum(up.dtype, linear)
    before = tl.zeros_like(up) + empty
    behind = before
    place = (first << 16) | q
    lowest = tl.min(tl.where(in_batch, label, 0x7FFFFFFFFFFFFFFF), 0)
    label = tl.where(in_batch, label - lowest, -1)  # read as unsigned: -1 is the largest label
    open_bits = tl.reduce(tl.where(in_batch, label, 0), 0, _bit_or)  # the bits in which labels may differ
    bit = tl.full((), 63, tl.int64)
    one_bit = tl.full((), 1, tl.int64)
    while open_bits != 0:
        while ((open_bits >> bit) & 1) == 0:
            bit -= 1
        open_bits = open_bits ^ (one_bit << bit)
        # Mark where groups and runs begin, in the direction of each scan: `edges` (forward) and `ends` (backward).
        differ = label ^ tl.gather(label, tl.maximum(q - 1, 0), 0)
        group = (q == 0) | ((differ & -(one_bit << bit << 1)) != 0)
        run = (q == 0) | ((place >> 16) != (tl.gather(place, tl.maximum(q - 1, 0), 0) >> 16))
        edges = tl.where(group, 3, run.to(tl.int32))
        ends = at(edges, q + 1, 3, BLOCK)
        one = ((label >> bit) & 1) != 0
        count = tl.where(one, 4, 1 << 16)
        x = tl.where(one, up, empty)
        y = flip(tl.where(one, empty, inverses(up, in_batch, linear)), BLOCK)
        marks = flip(ends | count, BLOCK)
        flags = edges | count
        seen = tl.zeros_like(up) + empty
        if linear:
            _, seen, flags, _, unseen, marks = tl.associative_scan((x, seen, flags, y, seen, marks), 0, _append)
        else:
            unseen, marks = _log_appended(y, seen, marks, empty, BLOCK)
            seen, flags = _log_appended(x, seen, flags, empty, BLOCK)
        before = tl.where(one, before, plus(before, seen, linear))
        behind = tl.where(one, plus(behind, flip(unseen, BLOCK), linear), behind)
        if open_bits != 0:
            source = _partition((~one).to(tl.int32), flags, flip(marks, BLOCK), BLOCK)
            label, place = tl.gather(label, source, 0), tl.gather(place, source, 0)
            up = tl.gather(up, source, 0)
            before, behind = tl.gather(before, source, 0), tl.gather(behind, source, 0)
    return before, behind, place, up
