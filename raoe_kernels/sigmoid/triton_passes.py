"""Triton kernel that sigmoid_loss runs between its matrix products. A program reads a row of logits once, and writes
its weights. The products read scaled rows, as in infonce.triton_passes. Every sum is computed in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from ..infonce.triton_passes import IDS, MASK, NONE, UNIT, leaves_out, log_one_plus, narrow
from ..triton_rows import kernel

__all__ = ["IDS", "MASK", "NONE", "UNIT", "sigmoid_weights"]


@triton.jit
def _softplus_and_sigmoid(x):
    """Return softplus(x) = -log sigmoid(-x), accurate for small values, and sigmoid(x). Both are NaN if x is NaN."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x > 0, x, 0.0) + log_one_plus(e), tl.where(x > 0, 1.0, e) / (1 + e)


@kernel
def sigmoid_weights(
    logits, weights, own_weights, inverse, scale, bias, targets, mask, row_ids, column_ids, row_groups, column_groups,
    stats, first, row_count, column_count, units, row_place, has_targets, mask_row: tl.int64, mask_column: tl.int64,
    shrink: tl.float64, stretch: tl.float64, BLOCK: tl.constexpr, IGNORE: tl.constexpr, GROUPED: tl.constexpr,
    GRADIENT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write the losses of a chunk of rows, starting with row `first`, to `stats`. With GRADIENT, also write the
    derivatives with respect to scale and bias to `stats` (starting at the indices row_count and 2 x row_count).

    A cosine is the product of two scaled rows, multiplied by `shrink` and by the `inverse` of each row. With GRADIENT,
    the kernel stores in `weights` the derivative of the loss with respect to each product of two scaled rows. The
    stored derivatives leave out the factors `scale` and `shrink`, and include the factor `stretch` (see
    triton_kernels._stretch). The derivative at a row's own column is written to `own_weights` instead, without
    rounding.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    line = tl.program_id(0).to(tl.int64)
    i = first + line
    target = tl.where(has_targets != 0, tl.load(targets + i, has_targets != 0, 0), i)
    legal = (target >= -1) & (target < column_count)
    length = units * UNIT
    logits += line * length
    weights += line * length
    row_inverse = tl.load(inverse + row_place + i)
    cosine_factor = row_inverse * tl.full((), shrink, dtype)
    factor = row_inverse * tl.full((), stretch, dtype)
    slope, shift = tl.load(scale), tl.load(bias)
    row_id = tl.load(row_ids + i) if IGNORE == 2 else 0
    row_group = tl.load(row_groups + i) if GROUPED else 0
    mask += i * mask_row

    total = tl.full((BLOCK,), 0.0, dtype)
    by_scale = tl.full((BLOCK,), 0.0, dtype)
    by_bias = tl.full((BLOCK,), 0.0, dtype)
    own_weight = tl.full((BLOCK,), 0.0, dtype)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        padded_range, in_range = column < length, column < column_count
        inv_norm = tl.load(tl.multiple_of(inverse + column, 16), padded_range, 0.0)
        cosine = tl.load(tl.multiple_of(logits + column, 16), padded_range, 0.0) * cosine_factor * inv_norm
        own = column == target
        positive = own
        if GROUPED:
            positive = own | (tl.load(column_groups + column, in_range, 0) == row_group)
        is_counted = in_range
        if IGNORE != 0:
            ignore_mask = leaves_out(mask, row_id, column_ids, column.to(tl.int64), in_range, mask_column, 0, IGNORE)
            # An ignored NaN must still make the loss NaN.
            is_counted = in_range & ((ignore_mask == 0) | positive | (inv_norm != inv_norm))
        x = cosine * slope + shift
        loss, w = _softplus_and_sigmoid(tl.where(positive, -x, x))
        total += tl.where(is_counted, loss, 0.0)
        if GRADIENT:
            w = tl.where(is_counted, tl.where(positive, -w, w), 0.0)
            by_scale += w * cosine
            by_bias += w
            w *= inv_norm
            own_weight += tl.where(own, w, 0.0)
            out = tl.multiple_of(weights + column, 16)
            tl.store(out, narrow(tl.where(own, 0.0, w) * factor, weights.dtype.element_ty, INTERPRETED), padded_range)

    poison = tl.where(legal, row_inverse * 0, float("nan"))  # NaN for a NaN row, even if all its columns are left out
    tl.store(stats + i, tl.sum(total, 0) + poison)
    if GRADIENT:
        tl.store(stats + row_count + i, tl.sum(by_scale, 0) + poison)
        tl.store(stats + 2 * row_count + i, tl.sum(by_bias, 0) + poison)
        tl.store(own_weights + i, tl.sum(own_weight, 0) * factor)
