"""info_nce_loss for several widths, one chunk of rows at a time. All widths share their matrix products.

A segment consists of the embedding dimensions between two neighbouring widths. The logits of width k are x_k = scale
(dot_1 + … + dot_k) / (|a| |b|), where dot_s is the dot product over segment s, and a and b are the prefixes of width k.
Segment s belongs to all widths k >= s. Let g_k be the gradient of loss L_k with respect to dot_k. Then the gradient of
segment s of a is one matrix product with segment s of b, (g_s + … + g_K) b_s, and the gradient of segment s of b is
(g_s + … + g_K)^T a_s. The gradient through the norms needs the sums of dL_k/dx_k * x_k over each row and column. So all
K widths need three products per segment, which take as many operations as the three products of the widest width alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..._contract import Gradients, Needs
from ..._dtypes import wide
from ..._widths import from_here_on, segments
from ..problem import EPS, Problem, add_rows, equal_ids, is_ignored, losses, mean_factor, own_columns, split
from .weights import with_weights

# Bytes of all widths' logits in a chunk: enough rows for products at full speed, few enough to fit into a last-level
# cache.
BUFFER = 24 << 20
ROWS = 256  # maximum number of rows in a chunk: more rows do not make the products faster
# Segments of up to this many columns are stored column by column. If they were stored as many short rows, matrix
# products would take twice as long, and sums three times as long.
NARROW = 32


class _Side(NamedTuple):
    """One side of the logits: the rows or the columns.

    Attributes:
        rows: one matrix per segment, (n, width of the segment), not normalised, float32 or float64
        inverse: (K, n), 1 / norm of each prefix, 0 where the prefix counts as zero
        grads: sums of the gradients that flow through the products, with the shapes of `rows`; [] if not needed
        along: (K, n), weight * dL/dx * x, summed over the columns (for rows) or the rows (for columns) of the logits
        whole: (n, last width) or None, the gradient buffer; wide segments in `grads` are views of this buffer
    """

    rows: list[Tensor]
    inverse: Tensor
    grads: list[Tensor]
    along: Tensor
    whole: Tensor | None


def sweep(problem: Problem, weights: Tensor, needs: Needs) -> tuple[Tensor, Gradients]:
    """Compute the losses and gradients for all widths. See weights.Sweep."""
    dims = problem.dims or ()
    a, poison_a = _side((problem.anchors,), dims, needs[0])
    k, poison_k = _side((problem.positives, problem.negatives), dims, needs[1] or needs[2])
    factor = mean_factor(problem, poison_a + poison_k)
    targets, positives = own_columns(problem), len(problem.positives)
    part = slice(0 if needs[1] else positives, problem.column_count if needs[2] else positives)
    shares = weights * factor if any(needs) else None
    total = _direction(a, k, targets, problem.scale, shares, lambda chunk: is_ignored(problem, chunk), part)
    if problem.symmetric:
        own = torch.arange(len(problem.anchors), device=targets.device)
        rows, grads = [x[targets] for x in k.rows], [torch.zeros_like(x) for x in a.rows if k.grads]
        back = _Side(rows, k.inverse[:, targets].contiguous(), grads, torch.zeros_like(a.along), None)
        total = total + _direction(
            back, a, own, problem.scale, shares, lambda chunk: _ignored_back(problem, targets[chunk]), slice(None)
        )
        for sums, row_grads in zip(k.grads, grads, strict=True):
            add_rows(sums, targets, row_grads)
        add_rows(k.along.t(), targets, back.along.t())
    of_anchors, of_columns = _finish(a, dims, problem.anchors), _finish(k, dims, problem.positives)
    return total * factor, split(of_anchors, of_columns, positives, needs)


def _direction(
    row_side: _Side,
    col_side: _Side,
    targets: Tensor,
    scale: float,
    weights: Tensor | None,
    ignore_mask: Callable[[slice], Tensor | None],
    part: slice,
) -> Tensor:
    """Return the sum of the rows' losses for each width (K,). Multiply the gradients by `weights`, write the gradients
    of the rows to `row_side`, and add the gradients of the columns to `col_side`."""
    anchors, count, like = len(row_side.rows[0]), len(col_side.rows[0]), col_side.rows[0]
    widths = len(col_side.rows)
    step = max(1, min(anchors, ROWS, BUFFER // (widths * count * like.element_size())))
    step = -(-anchors // -(-anchors // step))  # equal chunks
    buffer = like.new_empty(widths * step * count)
    of_rows, total = row_side.inverse * scale, like.new_zeros(widths)
    for start in range(0, anchors, step):
        chunk = slice(start, min(start + step, anchors))
        chunk_rows = [_by_column(x[chunk]) for x in row_side.rows]
        products = buffer[: widths * len(chunk_rows[0]) * count].view(widths, len(chunk_rows[0]), count)
        for rows, columns, dots in zip(chunk_rows, col_side.rows, products, strict=True):
            torch.mm(rows, columns.T, out=dots)
        mask = ignore_mask(chunk)
        mask = None if mask is None else mask.contiguous()
        losses, along = _weigh(
            products, of_rows[:, chunk].contiguous(), col_side.inverse, targets[chunk], mask, weights, col_side.along
        )
        total += losses.sum(1)
        if along is None:
            continue
        row_side.along[:, chunk] = along
        for grads, columns, dots in zip(row_side.grads, col_side.rows, products, strict=False):
            torch.mm(dots, columns, out=grads[chunk])
        for grads, rows, dots in zip(col_side.grads, chunk_rows, products, strict=False):
            grads[part].addmm_(dots[:, part].T, rows)
    return total


def _weigh(
    products: Tensor,
    of_rows: Tensor,
    of_columns: Tensor,
    own: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    along_columns: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows' losses (K, n) for all widths, given the matrix products (K, n, C) of all segments.

    `of_rows` is scale / |row|, `of_columns` is 1 / |column|, `own` is the column of each row's positive, and `mask` is
    True for columns that are left out. If `weights` is not None, overwrite the products with their gradients, summed
    over the widths. In this case, also return weight * dL/dx * x, summed over each row, and add its sums over each
    column to along_columns.
    """
    own, row_losses, along_rows = own[:, None], [], []
    for before, after in pairwise(products):
        after += before
    x, share = torch.empty_like(products[0]), None
    for k, dots in enumerate(products):
        torch.mul(dots, of_rows[k, :, None], out=x).mul_(of_columns[k])
        own_logit = x.gather(1, own)
        if mask is not None:
            x.masked_fill_(mask, -torch.inf).scatter_(1, own, own_logit)
        shift = x.amax(1, keepdim=True)
        # Leave the positive out of the sum: with it, the sum's rounding error could be larger than a small loss.
        neg_sum = x.sub_(shift).exp_().scatter_(1, own, 0).sum(1, keepdim=True)
        own_exp = (own_logit - shift).exp_()
        row_losses.append(losses(neg_sum, own_exp, shift, own_logit)[:, 0])
        if weights is None:
            continue
        x.scatter_(1, own, -neg_sum).mul_(weights[k] * of_rows[k, :, None] / (neg_sum + own_exp)).mul_(of_columns[k])
        share = torch.mul(x, dots, out=share)
        along_rows.append(share.sum(1))
        along_columns[k] += share.sum(0)
        dots.copy_(x)
    if weights is None:
        return torch.stack(row_losses), None
    for wider, narrower in pairwise(products.unbind()[::-1]):
        narrower += wider
    return torch.stack(row_losses), torch.stack(along_rows)


def _side(parts: tuple[Tensor | None, ...], dims: tuple[int, ...], need: bool) -> tuple[_Side, Tensor]:
    """Return a side, and a "poison" (K,): NaN for each width at which a prefix or its norm is not finite, else 0."""
    matrices = [x[:, : dims[-1]] for x in parts if x is not None]
    whole = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
    whole = whole.to(wide(whole.dtype))
    rows = [_by_column(whole[:, segment]) for segment in segments(dims)]
    norms = torch.stack([torch.linalg.vecdot(x, x) for x in rows]).cumsum(0).sqrt_()
    inverse = (1 / norms).masked_fill(norms <= EPS, 0)
    grads = torch.zeros_like(whole) if need else None
    segment_grads = [] if grads is None else [_by_column(grads[:, segment]) for segment in segments(dims)]
    return _Side(rows, inverse, segment_grads, torch.zeros_like(norms), grads), (norms * 0).sum(1)


def _by_column(columns: Tensor) -> Tensor:
    """Store a narrow segment column by column, and leave a wide segment unchanged (see NARROW)."""
    return columns.T.contiguous().T if columns.shape[1] <= NARROW else columns


def _finish(side: _Side, dims: tuple[int, ...], matrix: Tensor) -> Tensor | None:
    """Return the gradient of a side's rows: add the part through the norms, and pad with 0 beyond the last width."""
    if side.whole is None:
        return None
    through = from_here_on(side.along * side.inverse.square())
    for segment, rows, grads, share in zip(segments(dims), side.rows, side.grads, through, strict=True):
        torch.addcmul(grads, rows, share[:, None], value=-1, out=side.whole[:, segment])
    missing = matrix.shape[1] - dims[-1]
    return torch.nn.functional.pad(side.whole, (0, missing)) if missing else side.whole


def _ignored_back(problem: Problem, rows: Tensor) -> Tensor | None:
    """Return a bool mask (n, N), True at [i, j] if `ignore` excludes column rows[i] for anchor j, or None without
    `ignore`."""
    if problem.anchor_ids is not None and problem.column_ids is not None:
        return equal_ids(problem.column_ids[rows], problem.anchor_ids, back=True)
    return None if problem.ignored is None else problem.ignored[:, rows].T


forward, backward = with_weights(sweep)
