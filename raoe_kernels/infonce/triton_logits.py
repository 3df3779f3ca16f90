"""The Triton kernels of info_nce_loss: tiles of logits live on chip only. No atomics: every sum has one order."""

from __future__ import annotations

import triton
import triton.language as tl

NONE, MASK, IDS = 0, 1, 2  # what says which columns an anchor ignores
# Rows begin at multiples of 16 bytes and are this many elements long or a multiple of it, so that they are loaded 16
# bytes at a time; others are copied, with zeros after the last column. Kernels get strides and depth in this unit.
UNIT = tl.constexpr(16)

SCALARS = ["row_count", "column_count", "depth", "row_stride", "column_stride", "mask_row", "mask_column", "per_split"]
SCALARS += ["width", "first", "tau"]
POINTERS = ["rows", "columns", "inverse_rows", "inverse_columns", "targets", "mask", "row_ids", "column_ids", "peak"]
POINTERS += ["others", "at_own", "stats", "factor", "grad"]


# One compilation for all numbers and alignments.
kernel = triton.jit(do_not_specialize=SCALARS + POINTERS, do_not_specialize_on_alignment=POINTERS)


@triton.jit
def _rows_of(x, index, inside, depth_index, depth, stride):
    """Elements depth_index of rows `index`, (rows, depths); 0 outside."""
    where = tl.multiple_of(x + (index[:, None] * stride + depth_index[None, :]), (16, 16))
    return tl.load(where, inside[:, None] & (depth_index < depth)[None, :], 0.0)


@triton.jit
def _product(x, y, sums, PRECISION: tl.constexpr):
    """sums + x y, accumulated in the dtype of sums."""
    if PRECISION == "widened":
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums)
    return tl.dot(x, y, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def _narrow(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x in a dtype that may have fewer digits; Triton's interpreter would cut off what bfloat16 rounds."""
    if PRECISION == "widened" and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _cosines(
    rows, columns, row, column, row_in, column_in, over_rows, over_columns, depth, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS) similarities. Products are of the rows as given; norms come after, in full precision."""
    dtype: tl.constexpr = over_rows.dtype
    dot = tl.zeros((ROWS, COLUMNS), dtype)
    for start in range(0, depth, DEPTH):
        part = start + tl.arange(0, DEPTH)
        x = _rows_of(rows, row, row_in, part, depth, row_stride)
        y = _rows_of(columns, column, column_in, part, depth, column_stride)
        dot = _product(x, tl.trans(y), dot, PRECISION)
    return dot * over_rows[:, None] * over_columns[None, :]


@triton.jit
def _ignored(mask, row_ids, column_ids, row, column, row_in, column_in, mask_row, mask_column, IGNORE: tl.constexpr):
    """(ROWS, COLUMNS) of columns that the caller calls no negatives."""
    if IGNORE == 1:
        where = row[:, None] * mask_row + column[None, :] * mask_column
        return tl.load(mask + where, row_in[:, None] & column_in[None, :], 0) != 0
    ids = tl.load(row_ids + row, row_in, 0)
    return ids[:, None] == tl.load(column_ids + column, column_in, 0)[None, :]


@kernel
def info_nce_forward(
    rows, columns, inverse_rows, inverse_columns, targets, mask, row_ids, column_ids, peak, others, at_own,
    row_count, column_count, depth, row_stride: tl.int64, column_stride: tl.int64, mask_row: tl.int64,
    mask_column: tl.int64, per_split, tau: tl.float64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IGNORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of some rows over one split's columns: largest logit m, sum of exp(logit - m) over all but the row's own column,
    and the own column's logit (0 where it is another split's), each to (splits, row_count)."""
    dtype: tl.constexpr = peak.dtype.element_ty
    depth, row_stride, column_stride = depth * UNIT, row_stride * UNIT, column_stride * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < row_count
    scaled = tl.load(inverse_rows + row, row_in, 0.0) * tl.full((), tau, dtype)
    target = tl.load(targets + row, row_in, -1)
    m = tl.full((ROWS,), float("-inf"), dtype)
    total = tl.zeros((ROWS,), dtype)
    own_logit = tl.zeros((ROWS,), dtype)
    begin = tl.program_id(1) * per_split
    for start in range(begin, tl.minimum(begin + per_split, column_count), COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        column_in = column < column_count
        over = tl.load(inverse_columns + column, column_in, 0.0)
        x = _cosines(rows, columns, row, column, row_in, column_in, scaled, over, depth, row_stride, column_stride,
                     ROWS, COLUMNS, DEPTH, PRECISION)  # fmt: skip
        own = target[:, None] == column[None, :]
        counts = column_in[None, :]
        if IGNORE != 0:
            ignored = _ignored(mask, row_ids, column_ids, row, column, row_in, column_in, mask_row, mask_column, IGNORE)
            counts = counts & (own | (ignored == 0))
        x = tl.where(counts, x, float("-inf"))
        own_logit += tl.sum(tl.where(own, x, 0.0), 1)
        higher = tl.maximum(m, tl.max(x, 1))
        # A split of which nothing counts has no maximum to subtract.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(m - shift) + tl.sum(tl.where(own, 0.0, tl.exp(x - shift[:, None])), 1)
        m = higher
    place = tl.program_id(1).to(tl.int64) * row_count + row
    tl.store(peak + place, m, row_in)
    tl.store(others + place, total, row_in)
    tl.store(at_own + place, own_logit, row_in)


@kernel
def info_nce_gradient(
    rows, columns, inverse_rows, inverse_columns, targets, mask, row_ids, column_ids, stats, factor, grad,
    row_count, column_count, depth, row_stride: tl.int64, column_stride: tl.int64, mask_row: tl.int64,
    mask_column: tl.int64, width, first, tau: tl.float64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr,
    IGNORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT elements of the gradients of some rows, `width` long. TRANSPOSED: the rows are columns first, first + 1, … of
    the logits, and the columns are its rows.

    With w = dloss/dlogit and u = row / |row|: (tau sum of w column / |column| - (sum of w logit) u) / |row|.
    """
    dtype: tl.constexpr = inverse_rows.dtype.element_ty
    given: tl.constexpr = rows.dtype.element_ty
    depth, row_stride, column_stride = depth * UNIT, row_stride * UNIT, column_stride * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < row_count
    part = tl.program_id(1) * OUT + tl.arange(0, OUT)
    over_row = tl.load(inverse_rows + row, row_in, 0.0)
    scaled = over_row * tl.full((), tau, dtype)
    by_unit = tl.zeros((ROWS, OUT), dtype)
    along = tl.zeros((ROWS,), dtype)
    # Statistics are those of the logits' rows: shift, 1 / sum and the own column's weight, one after the other.
    count = column_count if TRANSPOSED else row_count
    for start in range(0, column_count, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        column_in = column < column_count
        over = tl.load(inverse_columns + column, column_in, 0.0)
        x = _cosines(rows, columns, row, column, row_in, column_in, scaled, over, depth, row_stride, column_stride,
                     ROWS, COLUMNS, DEPTH, PRECISION)  # fmt: skip
        index, index_in = (column, column_in) if TRANSPOSED else (row, row_in)
        shift = tl.load(stats + index, index_in, 0.0)
        share = tl.load(stats + count + index, index_in, 0.0)
        own_weight = tl.load(stats + count + count + index, index_in, 0.0)
        target = tl.load(targets + index, index_in, -1)
        if TRANSPOSED:
            own = target[None, :] == (first + row)[:, None]
            w = tl.exp(x - shift[None, :]) * share[None, :]
            w = tl.where(own, own_weight[None, :], w)
        else:
            own = target[:, None] == column[None, :]
            w = tl.exp(x - shift[:, None]) * share[:, None]
            w = tl.where(own, own_weight[:, None], w)
        counts = row_in[:, None] & column_in[None, :]
        if IGNORE != 0:
            ignored = _ignored(mask, row_ids, column_ids, row, column, row_in, column_in, mask_row, mask_column, IGNORE)
            counts = counts & (own | (ignored == 0))
        w = tl.where(counts, w, 0.0)
        along += tl.sum(w * x, 1)
        w *= over[None, :]
        y = _rows_of(columns, column, column_in, part, depth, column_stride)
        if given == tl.float16:
            # Weights reach below float16's range. TF32 holds all of float16's digits, and float32's exponents.
            by_unit = _product(w, y.to(tl.float32), by_unit, "tf32")
        else:
            by_unit = _product(_narrow(w, given, PRECISION), y, by_unit, PRECISION)
    unit = _rows_of(rows, row, row_in, part, depth, row_stride).to(dtype) * over_row[:, None]
    result = (by_unit * tl.full((), tau, dtype) - along[:, None] * unit) * (over_row * tl.load(factor))[:, None]
    place = row[:, None] * width + part[None, :]
    tl.store(grad + place, _narrow(result, grad.dtype.element_ty, PRECISION), row_in[:, None] & (part < width)[None, :])
