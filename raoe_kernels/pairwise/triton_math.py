"""What the pairwise Triton kernels share: sums in the log domain, the angle, the place of a rank in the
order.

A sum of exponentials is carried as a pair (m, s) and stands for s x exp(m). m is one of the exponents that
went in, so nothing overflows, whatever tau is; the empty sum is (the lowest exponent, 0), so that no infinity
is ever subtracted from another. Prefix sums always run forward, on a reversed copy where a suffix is needed:
Triton's own reverse scans have been wrong before (triton#4362).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tie rules as the kernels receive them: the position in this tuple. Under the last two, ranks are one to a
# position and one to a run; the others come from the first and last position of the run of equal scores.
TIES = ("average", "min", "max", "ordinal", "dense")
MAX = tl.constexpr(2)
ORDINAL = tl.constexpr(3)
DENSE = tl.constexpr(4)
AVERAGE = tl.constexpr(0)

CLIP = tl.constexpr(1e-6)  # as in reference.py
HALF_PI = tl.constexpr(1.5707963267948966)


@triton.jit
def lowest(dtype: tl.constexpr):
    """The exponent of an empty sum, below any that `exponent` returns."""
    bound: tl.constexpr = -1.6e308 if dtype == tl.float64 else -3.2e38
    return bound


@triton.jit
def scalar(value, dtype: tl.constexpr):
    """A Python number in the compute dtype with all its digits: a float argument is float32 unless one says
    otherwise."""
    return tl.full((), value, dtype)


@triton.jit
def exponent(tau, value, origin):
    """tau (value - origin), kept within half of the dtype's range, so that the sum of two such is finite."""
    high: tl.constexpr = 8e307 if value.dtype == tl.float64 else 1.6e38
    low: tl.constexpr = -8e307 if value.dtype == tl.float64 else -1.6e38
    return tl.minimum(tl.maximum(tau * (value - origin), low), high)


@triton.jit
def join(m, s, other_m, other_s):
    top = tl.maximum(m, other_m)
    low = tl.exp(-tl.abs(m - other_m))
    first = m >= other_m
    return top, tl.where(first, s, s * low) + tl.where(first, other_s * low, other_s)


@triton.jit
def masked(x, mask):
    """Each x as a sum of one term, empty where masked out."""
    return tl.where(mask, x, lowest(x.dtype)), mask.to(x.dtype)


@triton.jit
def running(m, s):
    """Inclusive prefix sums."""
    return tl.associative_scan((m, s), 0, join)


@triton.jit
def total(m, s):
    """The sum of a whole block."""
    # An exponent may have overflowed to -inf where the sum is empty.
    top = tl.maximum(tl.max(m, 0), lowest(m.dtype))
    return top, tl.sum(s * tl.exp(m - top), 0)


@triton.jit
def at(m, s, index, BLOCK: tl.constexpr):
    """Element `index` of each of the two, empty where the index lies outside."""
    inside = (index >= 0) & (index < BLOCK)
    index = tl.minimum(tl.maximum(index, 0), BLOCK - 1)
    return tl.where(inside, tl.gather(m, index, 0), lowest(m.dtype)), tl.where(inside, tl.gather(s, index, 0), 0.0)


@triton.jit
def logarithm(m, s):
    return tl.where(s > 0, m + tl.log(tl.where(s > 0, s, 1.0)), lowest(m.dtype))


@triton.jit
def log_one_plus(m, s):
    """log(1 + s exp(m)) with the digits of a small z = s exp(m).

    In float32 the logarithm of a number near 1 has none, so a series serves there: log(1 + z) = 2 artanh(w) with
    w = z / (2 + z), at most 1/3 here. In float64 it has, but 1 + z has lost those of z: log(1 + z) is nearly linear, so
    it is taken at what 1 + z became, d = fl(1 + z) - 1, and scaled by z / d (HP-15C Advanced Functions Handbook).
    """
    top = tl.maximum(m, 0.0)
    z = s * tl.exp(m - top)
    loss = top + tl.log(tl.exp(-top) + z)
    if m.dtype == tl.float32:
        w = z / (2.0 + z)
        square = w * w
        series = 1.0 / 15
        for k in tl.static_range(7):
            series = series * square + 1.0 / (13 - 2 * k)
        loss = tl.where(z < 1, 2 * w * series, loss)
    else:
        rounded = 1.0 + z
        d = rounded - 1.0
        loss = tl.where(z < 1, tl.where(d == 0, z, tl.log(rounded) * (z / tl.where(d == 0, 1.0, d))), loss)
    return loss


@triton.jit
def _asin_series(u):
    """p(u) with asin(t) = t + t^3 p(t^2) for t^2 = u <= 1/4, interpolated at Chebyshev nodes in 60 digits:
    off by 1.1e-9 (float32) and 3.8e-18 (float64) relative to asin(t) at most."""
    if u.dtype == tl.float32:
        p = u * 0.03369084720283012 + 0.017149238357677253
        p = u * p + 0.031100662735494568
        p = u * p + 0.044599401528512184
        p = u * p + 0.075000945434974235
        p = u * p + 0.16666666337430907
    else:
        p = u * 0.028757851367421565 - 0.014851887071247203
        p = u * p + 0.017400879442694022
        p = u * p + 0.0054575067186403583
        p = u * p + 0.010322814350185779
        p = u * p + 0.011479177415184906
        p = u * p + 0.013971212973552933
        p = u * p + 0.017352392720869973
        p = u * p + 0.022372172942149888
        p = u * p + 0.030381944138531247
        p = u * p + 0.04464285714635543
        p = u * p + 0.074999999999984329
        p = u * p + 0.16666666666666668
    return p


@triton.jit
def angle(c):
    """arccos of the clipped similarity, by asin near 0 and by asin of the half angle near +-1."""
    c = tl.minimum(tl.maximum(c, -1 + CLIP), 1 - CLIP)
    size = tl.abs(c)
    near = size > 0.5
    square = tl.where(near, (1 - size) * 0.5, size * size)
    root = tl.sqrt_rn(square) if c.dtype == tl.float32 else tl.sqrt(square)
    t = tl.where(near, root, size)
    asin = t + t * square * _asin_series(square)
    theta = tl.where(near, 2 * asin, HALF_PI - asin)
    return tl.where(c < 0, 2 * HALF_PI - theta, theta)


@triton.jit
def through_angle(c, by_minus_theta):
    """d(-theta)/dc = 1 / sqrt(1 - c^2), and 0 where the clip is active."""
    slope = tl.rsqrt((1 - c) * (1 + c))
    return tl.where((c > -1 + CLIP) & (c < 1 - CLIP), by_minus_theta * slope, 0.0)


@triton.jit
def doubled_rank(first, last, ties):
    """Twice the rank of a run of equal scores, but for dense ranks."""
    return tl.where(ties == AVERAGE, first + last, tl.where(ties == MAX, 2 * last, 2 * first))


@triton.jit
def count_at_most(first, last, bound, ties):
    """How many positions have a doubled rank of at most `bound`, given the run that holds position bound //
    2.

    Runs before that one rank below 2 (bound // 2) and runs behind it above bound, so it alone is in question.
    """
    count = tl.where(doubled_rank(first, last, ties) <= bound, last + 1, first)
    return tl.where(bound < 0, 0, count)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)
