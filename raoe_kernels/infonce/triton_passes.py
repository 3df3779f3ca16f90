"""Triton kernels that info_nce_loss runs before and after its matrix products, with one program per row. Every sum is
computed in a fixed order.

The products use scaled rows, so that no dtype overflows. `info_nce_rows` scales each row by a power of two, which is
exact. The norm of a scaled row is from 1/2 to 1 (times `stretch`). The kernel also stores 1 / norm of the scaled row,
which is from 1 to 2. Logits and weights are multiplied by 1 / norm in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_rows import at, kernel, root
from .problem import NO_CANDIDATE

NONE, MASK, IDS = 0, 1, 2  # how a call marks the columns to ignore
ABSENT = tl.constexpr(NO_CANDIDATE)
# Logits and scaled rows are padded to a multiple of UNIT columns, for 16-byte loads and tensor core alignment.
UNIT = tl.constexpr(16)
EPS = tl.constexpr(1e-8)  # problem.EPS


@triton.jit
def _inverse_norm(square):
    """Return 1 / norm, given the squared norm: 0 for a row that counts as zero, and NaN for a norm that is not
    finite."""
    norm = root(square)
    is_zero = norm <= tl.full((), EPS, norm.dtype)
    inverse = tl.where(is_zero, 0.0, 1 / tl.where(is_zero, 1.0, norm))
    return tl.where(norm < float("inf"), inverse, float("nan"))


@triton.jit
def _power_of_two(x):
    """Return the largest power of two <= x, or 0 for 0."""
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    else:
        return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round x to a narrower dtype. Triton's interpreter only truncates to bfloat16, so it needs explicit rounding."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def log_one_plus(z):
    """Return log(1 + z) for 0 <= z < 1, accurate for small z. The result is 2 artanh(w) with w = z / (2 + z) <= 1/3."""
    terms: tl.constexpr = 17 if z.dtype == tl.float64 else 8
    w = z / (2.0 + z)
    series = tl.full((), 1.0 / (2 * terms - 1), z.dtype)
    for k in tl.static_range(terms - 1):
        series = series * (w * w) + 1.0 / (2 * terms - 3 - 2 * k)
    return 2 * w * series


@triton.jit
def _part(row, start, step, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Return pointers to BLOCK elements of a row, starting at `start`. The stride `step` is used only if UNIT is 1."""
    if UNIT == 16:
        return at(row, start, UNIT) + tl.arange(0, BLOCK)
    return row + (start + tl.arange(0, BLOCK)) * step


@kernel
def info_nce_rows(
    anchors, positives, negatives, rows, columns, inverse, row_count, positive_count, column_count, width, units,
    row_place, anchor_row: tl.int64, anchor_column: tl.int64, positive_row: tl.int64, positive_column: tl.int64,
    negative_row: tl.int64, negative_column: tl.int64, stretch: tl.float64, BLOCK: tl.constexpr, IN_UNIT: tl.constexpr,
):  # fmt: skip
    """Write the anchors to `rows` and the positives and negatives to `columns`, scaled and padded with zeros. Write 1 /
    norm of each scaled row (without `stretch`) to `inverse`. In `inverse`, the columns start at index 0, and the
    anchors at index row_place. The first row_place programs process columns, and all others process anchors. IN_UNIT is
    the UNIT of the input matrices (see triton_rows.unit_of)."""
    dtype: tl.constexpr = inverse.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    index = place
    width *= IN_UNIT
    source, step, out = positives + index * positive_row * IN_UNIT, positive_column, columns
    limit = tl.where(index < column_count, width, 0)
    if index >= positive_count:
        source, step = negatives + (index - positive_count) * negative_row * IN_UNIT, negative_column
    if place >= row_place:
        index = place - row_place
        source, step, out = anchors + index * anchor_row * IN_UNIT, anchor_column, rows
        limit = tl.where(index < row_count, width, 0)
    square = tl.full((BLOCK,), 0.0, dtype)
    for start in range(0, width, BLOCK):
        part = start + tl.arange(0, BLOCK)
        x = tl.load(_part(source, start, step, BLOCK, IN_UNIT), part < limit, 0.0).to(dtype)
        square += x * x
    inv_norm = _inverse_norm(tl.sum(square, 0))
    power = _power_of_two(inv_norm)
    tl.store(inverse + place, tl.where(power == 0, 0.0, inv_norm / tl.where(power == 0, 1.0, power)))
    power *= tl.full((), stretch, dtype)
    length = units * UNIT
    out += index * length
    for start in range(0, length, BLOCK):
        part = start + tl.arange(0, BLOCK)
        x = tl.load(_part(source, start, step, BLOCK, IN_UNIT), part < limit, 0.0).to(dtype)
        tl.store(_part(out, start, 1, BLOCK, UNIT), (x * power).to(out.dtype.element_ty), part < length)


@triton.jit
def leaves_out(mask, row_id, column_ids, column, in_range, mask_column, back, IGNORE: tl.constexpr):
    """Return for each column whether `ignore` excludes it from a row's negatives, by `mask` or by the row's id row_id.
    For `back`, see problem.equal_ids."""
    if IGNORE == 1:
        return tl.load(mask + column * mask_column, in_range, 0) != 0
    column_id = tl.load(column_ids + column, in_range, 0)
    return (column_id == row_id) | (tl.where(back != 0, row_id, column_id) == ABSENT)


@triton.jit
def _negatives(
    logits, inverse, mask, row_id, column_ids, start, column_count, length, own, scaled, mask_column, back, hard,
    positive_count, raised, BLOCK: tl.constexpr, IGNORE: tl.constexpr,
):  # fmt: skip
    """For BLOCK columns, starting at `start`, return the index, 1 / norm, the changed logit and the original logit. The
    changed logit is -inf for own and ignored columns, and is multiplied by `raised` where the hardness mode applies.
    `hard` is 0 without a hardness mode, else 1 + the mode's index in problem.HARDNESS. The columns of one query are
    positive_count apart (see problem.of_one_query)."""
    column = start + tl.arange(0, BLOCK)
    padded_range = column < length
    inv_norm = tl.load(tl.multiple_of(inverse + column, 16), padded_range, 0.0)
    soft = tl.load(tl.multiple_of(logits + column, 16), padded_range, 0.0) * scaled * inv_norm
    x = soft
    if hard != 0:
        offset = (column - own).to(tl.int32)
        same_query = (offset >= 0) & (offset % positive_count == 0)
        x *= tl.where((hard == 3) | (same_query == (hard == 2)), raised, 1.0)
    in_range = column < column_count
    is_negative = in_range & (column != own)
    if IGNORE != 0:
        ignored = leaves_out(mask, row_id, column_ids, column.to(tl.int64), in_range, mask_column, back, IGNORE)
        # An ignored NaN must still make the loss NaN.
        is_negative = is_negative & ((ignored == 0) | (inv_norm != inv_norm))
    return column, inv_norm, tl.where(is_negative, x, float("-inf")), soft


@kernel
def info_nce_weights(
    logits, weights, own_weights, inverse, learned, targets, mask, row_ids, column_ids, by_column, stats,
    first, row_count, column_count, units, row_place, column_place, target_count, by_column_count, has_targets, back,
    hard, positive_count, mask_first, mask_row: tl.int64, mask_column: tl.int64, scale: tl.float64, limit: tl.float64,
    strength: tl.float64, stretch: tl.float64, BLOCK: tl.constexpr, IGNORE: tl.constexpr, SHIFTED: tl.constexpr,
    LEARNED: tl.constexpr, GRADIENT: tl.constexpr, SYMMETRIC: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write the losses of a chunk of rows, starting with row `first`, to `stats`. With GRADIENT, also store in
    `weights` the derivative of the loss with respect to each product of two scaled rows. The stored derivatives leave
    out the factor `scale`, and include the factor `stretch` (see triton_kernels._stretch).
    The derivative at a row's positive has the largest magnitude, so it is written to `own_weights`, without rounding.
    Before computing exp, the kernel subtracts the row's largest logit if SHIFTED, otherwise `limit`.

    With `back`, the kernel computes the second direction, whose rows are the anchors' targets and whose columns are the
    anchors. This pass stores each row's log(sum of exp) in `stats`, starting at index 2 x row_count, and each row's own
    weight, starting at index 3 x row_count. The SYMMETRIC pass that follows adds the weights of both directions. For
    `by_column` (by_column_count,), see triton_kernels._by_column.

    With LEARNED, `scale` is multiplied by the number at the address `learned`. With both LEARNED and GRADIENT, the
    derivative with respect to this number, times the number, is stored at the end of `stats`. `strength` is
    hardness_strength, divided by the scale unless LEARNED. Row 0 of the mask belongs to the anchor with index
    `mask_first`.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    line = tl.program_id(0).to(tl.int64)
    i = first + line
    target = tl.where(has_targets != 0, tl.load(targets + i, has_targets != 0, 0), i)
    legal = (target >= 0) & (target < target_count)
    target = tl.where(legal, target, 0)
    place, own = tl.where(back != 0, target, i), tl.where(back != 0, i, target)
    length = units * UNIT
    logits += line * length
    weights += line * length
    row_inverse = tl.load(inverse + row_place + place)
    inverse += column_place * UNIT
    scaled = row_inverse * tl.full((), scale, dtype)
    raised = tl.full((), strength, dtype)
    if LEARNED:
        scaled *= tl.load(learned)
        raised /= tl.load(learned)
    raised += 1
    row_id = tl.load(row_ids + place) if IGNORE == 2 else 0
    mask += (place - mask_first) * mask_row

    own_inverse = tl.load(inverse + own)
    own_logit = tl.load(logits + own) * scaled * own_inverse
    peak = tl.full((), limit, dtype)
    total = tl.full((BLOCK,), 0.0, dtype)
    m = tl.full((BLOCK,), float("-inf"), dtype)
    for start in range(0, column_count, BLOCK):
        _, _, x, _ = _negatives(logits, inverse, mask, row_id, column_ids, start, column_count, length, own, scaled,
                                mask_column, back, hard, positive_count, raised, BLOCK, IGNORE)  # fmt: skip
        if SHIFTED:
            new_m = tl.maximum(m, x)
            shift = tl.where(new_m == float("-inf"), 0.0, new_m)
            total = total * tl.exp(m - shift) + tl.exp(x - shift)
            m = new_m
        else:
            total += tl.exp(x - peak)
    if SHIFTED:
        peak = tl.maximum(tl.max(m, 0), own_logit)
        total *= tl.exp(m - peak)
    # Leave the positive out of the sum: with it, the sum's rounding error could be larger than a small loss.
    neg_sum, own_exp = tl.sum(total, 0), tl.exp(own_logit - peak)
    full_sum = neg_sum + own_exp
    own_weight = -neg_sum / full_sum
    ratio = neg_sum / own_exp
    loss = tl.where(ratio < 1, log_one_plus(tl.minimum(ratio, 1.0)), peak - own_logit + tl.log(full_sum))
    tl.store(stats + tl.where(back != 0, row_count, 0) + i, tl.where(legal, loss, float("nan")))
    if back != 0:
        tl.store(stats + 2 * row_count + i, peak + tl.log(full_sum))
        tl.store(stats + 3 * row_count + i, own_weight)

    if GRADIENT:
        if SYMMETRIC:
            own_weight += tl.load(stats + 3 * row_count + i)
            # Other anchors may share this target. In the second direction, this row is their negative, unless ignored.
            shared = tl.exp(own_logit - tl.load(by_column + own))
            shared -= tl.exp(own_logit - tl.load(stats + 2 * row_count + i))
            if IGNORE != 0:
                shared = tl.where(leaves_out(mask, row_id, column_ids, own, True, mask_column, 0, IGNORE), 0.0, shared)
            own_weight += shared
        share = 1 / full_sum
        factor = row_inverse * tl.full((), stretch, dtype)
        tl.store(own_weights + i, own_weight * (factor * own_inverse))
        by_scale = tl.full((BLOCK,), 0.0, dtype)
        for start in range(0, length, BLOCK):
            column, inv_norm, x, soft = _negatives(
                logits, inverse, mask, row_id, column_ids, start, column_count, length, own, scaled, mask_column, back,
                hard, positive_count, raised, BLOCK, IGNORE,
            )  # fmt: skip
            w = tl.exp(x - peak) * share
            if SYMMETRIC:
                w += tl.exp(x - tl.load(by_column + column, column < by_column_count, float("inf")))
            if LEARNED:
                by_scale += tl.where(x == float("-inf"), 0.0, w * soft)
            out = tl.multiple_of(weights + column, 16)
            tl.store(out, narrow(w * (factor * inv_norm), weights.dtype.element_ty, INTERPRETED), column < length)
        if LEARNED:
            place_of_scale = 4 * row_count if SYMMETRIC else row_count
            tl.store(stats + place_of_scale + i, tl.sum(by_scale, 0) + own_weight * own_logit)


@kernel
def info_nce_gradients(
    anchors, positives, negatives, by_rows, by_columns, own_weights, targets, grad_anchors, grad_positives,
    grad_negatives, loss, upstream, anchor_grads, first_column, row_count, positive_count, target_count, has_targets,
    width, units, anchor_row: tl.int64, anchor_column: tl.int64, positive_row: tl.int64, positive_column: tl.int64,
    negative_row: tl.int64, negative_column: tl.int64, scale: tl.float64, stretch: tl.float64, BLOCK: tl.constexpr,
    IN_UNIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of an input row from g, the corresponding row of the product with the weights. First add the
    term of the own pair to g. In this pair, the partner of an anchor is its target. Without targets, the partner of a
    column is its anchor. Then backpropagate through u = row / norm, which gives (g - <g, u> u) / norm, and undo the
    scaling of the rows by powers of two. The first anchor_grads programs process anchors, and all others process
    columns, starting at first_column."""
    dtype: tl.constexpr = own_weights.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    width, length = width * IN_UNIT, units * UNIT
    is_anchor = index < anchor_grads
    i, column = index, index
    if is_anchor:
        if has_targets != 0:
            column = tl.minimum(tl.maximum(tl.load(targets + index), 0), target_count - 1)
    else:
        column = index - anchor_grads + first_column
        i = tl.where((has_targets == 0) & (column < row_count), column, -1)
    anchor = anchors + tl.maximum(i, 0) * anchor_row * IN_UNIT
    other, other_step = positives + column * positive_row * IN_UNIT, positive_column
    out = grad_positives + column * width
    if column >= positive_count:
        negative = column - positive_count
        other, other_step = negatives + negative * negative_row * IN_UNIT, negative_column
        out = grad_negatives + negative * width
    row, step, partner, partner_step = other, other_step, anchor, anchor_column
    g = by_columns + (column - first_column) * length
    if is_anchor:
        row, step, partner, partner_step = anchor, anchor_column, other, other_step
        g, out = by_rows + index * length, grad_anchors + index * width
    own_weight = tl.load(own_weights + i, i >= 0, 0.0) * tl.full((), stretch, dtype)

    square = tl.full((BLOCK,), 0.0, dtype)
    partner_square = tl.full((BLOCK,), 0.0, dtype)
    dot = tl.full((BLOCK,), 0.0, dtype)
    cross = tl.full((BLOCK,), 0.0, dtype)
    for start in range(0, width, BLOCK):
        part = start + tl.arange(0, BLOCK)
        x = tl.load(_part(row, start, step, BLOCK, IN_UNIT), part < width, 0.0).to(dtype)
        y = tl.load(_part(partner, start, partner_step, BLOCK, IN_UNIT), part < width, 0.0).to(dtype)
        square += x * x
        partner_square += y * y
        dot += x * tl.load(_part(g, start, 1, BLOCK, UNIT), part < length, 0.0)
        cross += x * y
    inv_norm = _inverse_norm(tl.sum(square, 0))
    own_weight *= _power_of_two(_inverse_norm(tl.sum(partner_square, 0)))
    along = (tl.sum(dot, 0) + own_weight * tl.sum(cross, 0)) * inv_norm
    value = tl.load(loss)
    factor = tl.full((), scale, dtype) * tl.load(upstream) * _power_of_two(inv_norm)
    factor = tl.where(value == value, factor, value)  # NaN if the loss is NaN
    for start in range(0, width, BLOCK):
        part = start + tl.arange(0, BLOCK)
        unit = tl.load(_part(row, start, step, BLOCK, IN_UNIT), part < width, 0.0).to(dtype) * inv_norm
        y = tl.load(_part(partner, start, partner_step, BLOCK, IN_UNIT), part < width, 0.0).to(dtype)
        g_part = tl.load(_part(g, start, 1, BLOCK, UNIT), part < length, 0.0) + own_weight * y
        result = (g_part - along * unit) * factor
        tl.store(_part(out, start, 1, BLOCK, IN_UNIT), narrow(result, out.dtype.element_ty, INTERPRETED), part < width)
