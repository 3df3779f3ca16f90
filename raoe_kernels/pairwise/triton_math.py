"""Functions for the pairwise Triton kernels: sums of exponentials, the angle, and the index of each rank in the
sorted order.

The flag `linear` is true if max x - min x + 2 ln n is below the dtype's exponent range, where x are the n exponents. If
`linear` is true, sums of exponentials are stored as plain numbers, otherwise as logarithms. `linear` applies to a whole
kernel launch, and is tested at run time. Suffix sums are prefix sums of a reversed copy, because Triton's reverse scans
have had bugs (triton#4362).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rows import root

# Kernels receive a tie rule as its index in this tuple. "ordinal" ranks positions, and "dense" numbers runs of equal
# scores. Under the other rules, the rank of a run follows from its first and its last position.
TIES = ("average", "min", "max", "ordinal", "dense")
MAX = tl.constexpr(2)
ORDINAL = tl.constexpr(3)
DENSE = tl.constexpr(4)
AVERAGE = tl.constexpr(0)

UNCLIPPED = tl.constexpr(1 - 1e-6)  # as in reference.py
HALF_PI = tl.constexpr(1.5707963267948966)


@triton.jit
def scalar(value, dtype: tl.constexpr):
    """Convert a Python number to `dtype` without losing digits. By default, Triton treats float arguments as float32.
    Some versions of Triton also convert numbers in tl.minimum or in comparisons to float32."""
    return tl.full((), value, dtype)


# ---- Exponents, and their sums ----


@triton.jit
def exponents(c, low, high, scale, angular: tl.constexpr):
    """Return each pair's exponent x minus the midpoint (min x + max x) / 2, and the range max x - min x. The exponents
    are clamped to half of the dtype's range, so that the sum of two exponents is finite."""
    if angular:  # x = -scale theta
        c, low, high = -angle(c), -angle(low), -angle(high)
    bound: tl.constexpr = 8e307 if c.dtype == tl.float64 else 1.6e38
    x = scale * (c - (0.5 * low + 0.5 * high))
    return tl.minimum(tl.maximum(x, -bound), bound), scale * (high - low)


@triton.jit
def empty_sum(dtype: tl.constexpr, linear):
    """Return an empty sum: 0 if `linear`, otherwise a number that is smaller than any sum stored as a logarithm."""
    lowest: tl.constexpr = -1.6e308 if dtype == tl.float64 else -3.2e38
    return tl.where(linear, scalar(0.0, dtype), scalar(lowest, dtype))


@triton.jit
def terms(x, mask, linear):
    """Return exp(x), as a number if linear, else as its logarithm x. Where mask is False, return the empty sum."""
    up = x
    if linear:
        up = tl.exp(x)
    return tl.where(mask, up, empty_sum(x.dtype, linear))


@triton.jit
def inverses(up, mask, linear):
    """Return exp(-x), stored like `up`: 1 / up if linear, else -up. Where mask is False, return the empty sum."""
    down = -up
    if linear:
        down = 1.0 / up
    return tl.where(mask, down, empty_sum(up.dtype, linear))


@triton.jit
def log_add(a, b):
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def plus(a, b, linear):
    if linear:
        result = a + b
    else:
        result = log_add(a, b)
    return result


@triton.jit
def total(x, linear):
    """Return the sum of x over the block, stored like x: as a number if linear, else as its logarithm."""
    if linear:
        result = tl.sum(x, 0)
    else:
        # A product with an empty sum may have overflowed to -inf.
        top = tl.maximum(tl.max(x, 0), empty_sum(x.dtype, linear))
        result = top + tl.log(tl.maximum(tl.sum(tl.exp(x - top), 0), 1.0))
    return result


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _log_running(x):
    """Return inclusive prefix sums of numbers stored as logarithms, computed by doubling. A scan would be faster, but
    would take a minute to compile."""
    q = tl.arange(0, x.shape[0])
    reach = 1
    while reach < x.shape[0]:
        x = tl.where(q >= reach, log_add(tl.gather(x, tl.maximum(q - reach, 0), 0), x), x)
        reach *= 2
    return x


@triton.jit
def running(up, down, linear):
    """Return the inclusive prefix sums of `up` and those of `down`."""
    if linear:
        up, down = tl.associative_scan((up, down), 0, _add_two)
    else:
        up, down = _log_running(up), _log_running(down)
    return up, down


@triton.jit
def product(a, b, linear):
    return tl.where(linear, a * b, a + b)


@triton.jit
def log_one_plus(z, linear):
    """Return log(1 + z), accurate for small z. Unless `linear`, the caller passes log(z) as z.

    In float32, the GPU's log is inaccurate near 1, so a series is used: log(1 + z) = 2 artanh(w), where w = z / (2 + z)
    is at most 1/3. In float64, log is accurate, but 1 + z is rounded to fl(1 + z) = 1 + d. The factor z / d corrects
    for this rounding: the result is log(1 + d) * z / d, which is accurate because log(1 + t) / t is nearly equal for t
    = d and t = z (HP-15C Advanced Functions Handbook).
    """
    top = tl.where(linear, 0.0, tl.maximum(z, 0.0))  # log(1 + e^a) = max(a, 0) + log(1 + e^-|a|)
    if not linear:
        z = tl.exp(-tl.abs(z))
    rounded = 1.0 + z
    if z.dtype == tl.float32:
        w = z / (2.0 + z)
        square = w * w
        series = 1.0 / 15
        for k in tl.static_range(7):
            series = series * square + 1.0 / (13 - 2 * k)
        small = 2 * w * series
    else:
        d = rounded - 1.0
        small = tl.where(d == 0, z, tl.log(rounded) * (z / tl.where(d == 0, 1.0, d)))
    return top + tl.where(z < 1, small, tl.log(rounded))


@triton.jit
def slope(up, down, before, behind, z, loss, linear):
    """Return dL/dx - dL/dy = (exp(x) Q - exp(y) P) / (1 + Z), where y = -x, P = before and Q = behind (see scan.py)."""
    if linear:
        result = (up * behind - down * before) * (1.0 / (1.0 + z))
    else:
        result = tl.exp(up + behind - loss) - tl.exp(down + before - loss)
    return result


# ---- The angle ----


@triton.jit
def _asin_series(u):
    """Return the polynomial p(u) in asin(t) = t + t^3 p(t^2), where u = t^2 <= 1/4. The polynomial was interpolated at
    Chebyshev nodes with 60 digits. The error relative to asin(t) is at most 1.1e-9 (float32) or 3.8e-18 (float64)."""
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
    """Return arccos of the clipped c. If |c| <= 0.5, arccos c is pi/2 - asin(c). Otherwise, arccos c is computed from
    half the angle, asin(sqrt((1 - |c|) / 2))."""
    limit = scalar(UNCLIPPED, c.dtype)
    c = tl.minimum(tl.maximum(c, -limit), limit)
    size = tl.abs(c)
    near = size > 0.5
    square = tl.where(near, (1 - size) * 0.5, size * size)
    t = tl.where(near, root(square), size)
    asin = t + t * square * _asin_series(square)
    theta = tl.where(near, 2 * asin, HALF_PI - asin)
    return tl.where(c < 0, 2 * HALF_PI - theta, theta)


@triton.jit
def through_angle(c, by_minus_theta):
    """Return dL/dc = dL/d(-theta) / sqrt(1 - c^2), or 0 where c is clipped."""
    slope = 1 / root((1 - c) * (1 + c))
    return tl.where(tl.abs(c) < scalar(UNCLIPPED, c.dtype), by_minus_theta * slope, 0.0)


# ---- Ranks ----


@triton.jit
def doubled_rank(first, last, ties):
    """Return the doubled rank (2 x rank) of a run of equal scores, for all tie rules except "dense"."""
    return tl.where(ties == AVERAGE, first + last, tl.where(ties == MAX, 2 * last, 2 * first))


@triton.jit
def count_at_most(first, last, bound, ties):
    """Return the number of positions with doubled rank <= bound. `first` and `last` are the ends of the run of equal
    scores that contains position bound // 2.

    All earlier runs have doubled ranks below 2 * (bound // 2), and all later runs have doubled ranks above `bound`. So
    only the doubled rank of this run has to be compared with `bound`.
    """
    count = tl.where(doubled_rank(first, last, ties) <= bound, last + 1, first)
    return tl.where(bound < 0, 0, count)
