"""InfoNCE for bfloat16 rows, without storing logits. The kernel that multiplies anchors by columns exponentiates each
tile of logits in registers, and writes only exp(logit), which takes 2 bytes per logit.

A softmax weight is w = e / s, where e = exp(logit) and s is the sum of e over the row. The sum s is known only after
the row's last tile, so the kernel writes e, and the division by s comes later. The gradients are products of w with the
columns k or the anchors a. The division by s takes place after the product with k, and before the product with a:

    w = e / s[:, None],   w k = (e k) / s[:, None],   w^T a = e^T (a / s[:, None])

If several directions share one softmax, each direction has its own matrix e, and s is the sum over all directions. No
maximum is subtracted from the logits, because for scales up to UNSHIFTED_SCALE, exp(logit) and its sums are well within
the range of float32 and bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_rows import LOG2_E, kernel
from . import chunks
from .problem import Problem, own_columns, pools
from .triton_passes import ABSENT, IDS, MASK, NONE, UNIT, log_one_plus, narrow
from .triton_units import INTERPRETED, Units, add_to_columns, integers_or, padded

TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP": 32, "num_warps": 8, "num_stages": 3}
SUMS = {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def _halves(x):
    """Split a tile into the left and the right half of its columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _part(
    products, start, weights, inverse, mask, column_ids, factor, own, ids, line, row_mask, column_count, period, length,
    mask_column, back, IGNORE: tl.constexpr, GRADIENT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return the row sums of exp(logit) over a tile whose first column is `start`. With GRADIENT, also write exp(logit)
    / (column norm) to `weights`."""
    column = start + tl.arange(0, products.shape[1])
    column_mask = column < length
    inv_norm = tl.load(tl.multiple_of(inverse + start, 16) + tl.arange(0, products.shape[1]), column_mask, 0.0)
    x = products * inv_norm[None, :] * factor[:, None]
    query = column if IGNORE == 1 else column % period
    is_negative = (column < column_count)[None, :] & (query[None, :] != own[:, None])
    if IGNORE != 0:
        mask_range = row_mask[:, None] & (column < column_count)[None, :]
        if IGNORE == 1:
            ignored = tl.load(mask[:, None] + column.to(tl.int64)[None, :] * mask_column, mask_range, 0) != 0
        else:
            key_ids = tl.load(column_ids + column, column < column_count, 0)
            absent = tl.where(back != 0, ids[:, None], key_ids[None, :]) == ABSENT
            ignored = (ids[:, None] == key_ids[None, :]) | absent
        is_negative = is_negative & ((ignored == 0) | (x != x))  # an ignored NaN must still make the loss NaN
    e = tl.where(is_negative, tl.exp2(x), 0.0)
    if GRADIENT:
        at = tl.multiple_of(weights + start, 16) + line[:, None] * length + tl.arange(0, products.shape[1])[None, :]
        values = narrow(e * inv_norm[None, :], weights.dtype.element_ty, INTERPRETED)
        tl.store(at, values, row_mask[:, None] & column_mask[None, :])
    return tl.sum(e, 1)


@kernel
def info_nce_products(
    rows, columns, weights, sums, row_inverse, inverse, targets, mask, row_ids, column_ids, first, row_count,
    column_count, units, row_units, period, target_count, has_targets, back, mask_row: tl.int64, mask_column: tl.int64,
    scale: tl.float64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, IGNORE: tl.constexpr,
    GRADIENT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of exp(logit) for row_count rows, starting at row `first`. In each row, the result is 0 for the
    row's own column, for ignored columns, and for columns whose distance from the own column is a multiple of `period`.
    Write the tile's row sums to `sums`, whose shape is (tiles of columns, row_count). With GRADIENT, also write
    exp(logit) / (column norm) to `weights`."""
    tiles_m, tiles_n = tl.cdiv(row_count, BLOCK_M), tl.cdiv(units * UNIT, BLOCK_N)
    # Programs that run at the same time use the same GROUP tiles of rows, so the columns that they read stay cached.
    group = tl.program_id(0) // (GROUP * tiles_n)
    group_size = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside_group = tl.program_id(0) % (GROUP * tiles_n)
    tile_m, start = group * GROUP + inside_group % group_size, inside_group // group_size * BLOCK_N

    length, width = units * UNIT, row_units * UNIT
    line, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    row_mask = line < row_count
    i = first + tl.where(row_mask, line, 0)
    anchor, key = i.to(tl.int64), tl.where(column < length, column, 0).to(tl.int64)
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, width, BLOCK_K):
        lane = tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(tl.multiple_of(rows + k, 16) + anchor[:, None] * width + lane)
        b = tl.load(tl.multiple_of(columns + k, 16) + key[:, None] * width + lane)
        if INTERPRETED:  # the interpreter's tl.dot multiplies bfloat16 bits as if they were integers
            a, b = a.to(tl.float32), b.to(tl.float32)
        products = tl.dot(a, tl.trans(b), products)

    factor = tl.load(row_inverse + i) * (tl.full((), scale, tl.float32) * LOG2_E)
    own = tl.where(has_targets != 0, tl.load(targets + i, line < row_count * has_targets, 0), i).to(tl.int32)
    own = tl.where((own >= 0) & (own < target_count), own, 0)
    ids = tl.load(row_ids + i) if IGNORE == 2 else own
    left, right = _halves(products)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            part = _halves(left if half == 0 else right)[quarter]
            total += _part(
                part, start + (2 * half + quarter) * (BLOCK_N // 4), weights, inverse, mask + anchor * mask_row,
                column_ids, factor, own, ids, line.to(tl.int64), row_mask, column_count, period, length, mask_column,
                back, IGNORE, GRADIENT, INTERPRETED,
            )  # fmt: skip
    tl.store(sums + start // BLOCK_N * row_count + line, total, row_mask)


@kernel
def info_nce_shares(
    sums, inverse, targets, rows, columns, scaled, shares, own_weights, stats, first, row_count, row_units, tiles,
    row_place, target_count, has_targets, copies, scale: tl.float64, BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write each row's loss to `stats`. Let s be the row's sum of exp(logit). With GRADIENT, also write 1 / s to
    `shares`, the row divided by s and by its norm to `scaled`, and the weight at the row's own column to own_weights.
    `copies` is the number of other directions in which the own pair occurs again, as a negative."""
    line = tl.program_id(0)
    i = (first + line).to(tl.int64)
    target = tl.where(has_targets != 0, tl.load(targets + i, has_targets != 0, 0), i)
    legal = (target >= 0) & (target < target_count)
    own, length = tl.where(legal, target, 0), row_units * UNIT
    row, column = tl.multiple_of(rows + i * length, 16), tl.multiple_of(columns + own * length, 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        total += tl.load(sums + tile.to(tl.int64) * row_count + line, tile < tiles, 0.0)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        part = start + tl.arange(0, BLOCK)
        x = tl.load(row + part, part < length, 0.0).to(tl.float32)
        dot += x * tl.load(column + part, part < length, 0.0).to(tl.float32)
    row_inverse, own_inverse = tl.load(inverse + row_place + i), tl.load(inverse + own)
    own_logit = tl.sum(dot, 0) * row_inverse * own_inverse * tl.full((), scale, tl.float32)
    neg_sum, own_exp = tl.sum(total, 0), tl.exp(own_logit)
    full_sum, ratio = neg_sum + own_exp * (copies + 1), neg_sum / own_exp + copies
    # Leave the positive out of the sum: with it, the sum's rounding error could be larger than a small loss.
    loss = tl.where(ratio < 1, log_one_plus(tl.minimum(ratio, 1.0)), tl.log(full_sum) - own_logit)
    tl.store(stats + i, tl.where(legal, loss, float("nan")))
    if GRADIENT:
        tl.store(own_weights + i, -neg_sum / full_sum * row_inverse * own_inverse)
        tl.store(shares + line, 1 / full_sum)
        share = row_inverse / full_sum
        scaled = tl.multiple_of(scaled + line.to(tl.int64) * length, 16)
        for start in range(0, length, BLOCK):
            part = start + tl.arange(0, BLOCK)
            x = tl.load(row + part, part < length, 0.0).to(tl.float32) * share
            tl.store(scaled + part, narrow(x, scaled.dtype.element_ty, INTERPRETED), part < length)


def sweep(
    problem: Problem, units: Units, stats: Tensor, own_weights: Tensor | None, by_rows: bool, part: slice | None
) -> tuple[Tensor | None, Tensor | None]:
    """Write each row's loss to `stats`, and the weight at its own column to own_weights (if not None). Return the
    gradients with respect to the scaled anchors (None unless `by_rows`) and to the slice `part` of the scaled columns
    (None if `part` is None). These gradients do not include the terms of the own pairs (a row and its own column)."""
    n, (anchors, columns, inverse) = len(problem.anchors), units
    blocks, gradient = pools(problem)[0], own_weights is not None
    mask = (stats if problem.ignored is None else problem.ignored).view(torch.uint8)
    # Tuples (rows, 1 / norms, ids). sides: all anchors, all documents. row_sides: each anchor, each anchor's positive.
    sides: Any = (anchors, inverse[len(columns) :], problem.anchor_ids), (columns, inverse, problem.column_ids)
    row_sides, masks, own = [sides[0]], [mask], own_columns(problem) if len(blocks) > 1 else stats
    if len(blocks) > 1:
        picked: Any = slice(n) if problem.targets is None else own  # without targets, a slice avoids a copy
        row_sides.append([None if x is None else x[picked] for x in sides[1]])
        masks.append(mask if problem.ignored is None else mask[:, picked].t())
    ignore = MASK if problem.ignored is not None else NONE if problem.anchor_ids is None else IDS
    has_targets, unit = int(problem.targets is not None), UNIT.value
    lengths = [padded(block.width) for block in blocks]
    tiles = [triton.cdiv(length, TILE["BLOCK_N"]) for length in lengths]
    step = chunks.even(n, max(chunks.ROWS, chunks.BUFFER // (2 * sum(lengths) if gradient else 4 * sum(tiles))))
    by_anchors = inverse.new_zeros(anchors.shape) if by_rows else None
    by_columns = None if part is None else inverse.new_zeros(columns[part].shape)
    start = 0 if part is None else part.start
    for first in range(0, n, step):
        chunk = slice(first, min(first + step, n))
        count = chunk.stop - first
        sums, weights = inverse.new_empty(sum(tiles), count), []
        for block, length, block_sums in zip(blocks, lengths, sums.split(tiles), strict=True):
            rows, row_inverse, row_ids = row_sides[block.from_documents]
            keys, key_inverse, key_ids = sides[block.to_documents]
            (targets,) = integers_or(stats, problem.targets)
            row_ids, key_ids = (targets if x is None else x.contiguous() for x in (row_ids, key_ids))
            mask = masks[block.from_documents]
            grouped = block.from_documents and block.to_documents and problem.column_count % len(problem.positives) == 0
            weights.append(rows.new_empty(count, length) if gradient else rows)
            info_nce_products[(triton.cdiv(count, TILE["BLOCK_M"]) * len(block_sums),)](
                rows, keys, weights[-1], block_sums, row_inverse, key_inverse, targets, mask, row_ids, key_ids, first,
                count, block.width, length // unit, rows.shape[1] // unit,
                len(problem.positives) if grouped else length, block.width, has_targets * block.to_documents,
                int(block.pairs and block.from_documents), *mask.stride(), problem.scale, IGNORE=ignore,
                GRADIENT=gradient, INTERPRETED=INTERPRETED, **TILE,
            )  # fmt: skip
        scaled = [anchors.new_empty(count, anchors.shape[1]) if gradient else anchors]
        shares = inverse.new_empty(count) if gradient else stats
        info_nce_shares[(count,)](
            sums, inverse, *integers_or(stats, problem.targets), anchors, columns, scaled[0], shares,
            stats if own_weights is None else own_weights, stats, first, count, anchors.shape[1] // unit, len(sums),
            len(columns), problem.column_count, has_targets, sum(block.pairs for block in blocks) - 1, problem.scale,
            GRADIENT=gradient, INTERPRETED=INTERPRETED, **SUMS,
        )  # fmt: skip
        if not gradient:
            continue
        row_shares = [shares * row_inverse[chunk] for _, row_inverse, _ in row_sides]
        scaled += [(rows[chunk] * row_shares[1][:, None]).to(rows.dtype) for rows, _, _ in row_sides[1:]]
        for block in blocks:
            block_weights, side = weights.pop(0), block.from_documents
            keys = sides[block.to_documents][0][: block_weights.shape[1]]
            if by_anchors is not None and not side:
                by_anchors[chunk].addcmul_(chunks.product(block_weights, keys), row_shares[0][:, None])
            if by_columns is not None and side and problem.targets is not None:
                places = own[chunk] - start
                add_to_columns(by_columns, places, chunks.product(block_weights, keys), row_shares[1])
            elif by_columns is not None and side and start == 0:  # row i's positive is column i
                by_columns[chunk].addcmul_(chunks.product(block_weights, keys), row_shares[1][:, None])
            if by_anchors is not None and not block.to_documents:
                chunks.product(block_weights.t(), scaled[side], add=by_anchors)
            if by_columns is not None and block.to_documents and block.width > start:
                block_weights = block_weights[:, part]
                chunks.product(block_weights.t(), scaled[side], add=by_columns[: block_weights.shape[1]])
        del block_weights  # free the memory before the next chunk allocates its weights
    return by_anchors, by_columns
