"""info_nce_loss in plain torch, one chunk of rows at a time, with a bounded buffer instead of the whole matrix of
logits.

The loss is a mean over the rows, so the forward pass computes a chunk's gradient as soon as its logits are known. Each
block of a chunk needs three matrix products (see chunks.py): for the logits, the gradient of the rows, and the gradient
of the columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._contract import Gradients
from .._dtypes import wide
from . import chunks
from .chunks import Halves, UnitRows, cosines, halves, multiply, unit_rows
from .problem import (
    UNSHIFTED_SCALE,
    Block,
    Problem,
    add_rows,
    equal_ids,
    guide_threshold,
    losses,
    mean_factor,
    of_one_query,
    own_columns,
    pools,
    split,
    through_normalisation,
)

# Bytes of the buffer: large enough for matrix products at full speed (512 rows of 32,768 columns in float32).
BUFFER = 64 << 20


class _Side(NamedTuple):
    """One side of the logits, the anchors or the documents: as rows, as columns, and with the sums of their gradients.

    Attributes:
        places: index in `rows` for each of the N rows of the logits, or None if the index for row i is i
        own: index in `columns`, `guide` and `ids` for each of the N rows, or None if the index for row i is i
        factor: `columns` in the form that is multiplied by weights (UnitRows.factor)
        part: slice of the columns that have a gradient
    """

    rows: UnitRows
    by_rows: Tensor | None
    places: Tensor | None
    columns: UnitRows
    factor: Tensor | Halves
    by_columns: Tensor | None
    part: slice
    own: Tensor | None
    guide: UnitRows | None
    ids: Tensor | None


_Sides = tuple[_Side, _Side]  # (anchors, documents), indexed by a Block's from_documents and to_documents


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """Return the loss and the gradients that are needed, in float64 for float64 rows, otherwise in float32."""
    a, inverse_a, poison = unit_rows(problem.anchors)
    k, inverse_k, poison_k = unit_rows(problem.positives, problem.negatives)
    like = a.units
    by_a = torch.zeros_like(like) if needs[0] else None
    by_k = torch.zeros_like(k.units) if needs[1] or needs[2] else None
    poison, q, guide_q, guide_k = poison + poison_k, a, None, None
    if problem.all_anchors is not None:
        q, inverse_q, poison_q = unit_rows(problem.all_anchors)
        poison = poison + poison_q
    if problem.guide_anchors is not None:
        guide_q, _, first = unit_rows(problem.guide_anchors)
        guide_k, _, second = unit_rows(problem.guide_positives, problem.guide_negatives)
        poison = poison + (first + second).to(like.dtype)
    scale = problem.scale if problem.learned_scale is None else problem.learned_scale.to(like.dtype)
    factor = mean_factor(problem, poison)
    by_q = by_a
    if problem.all_anchors is not None:  # factor * 0 is NaN if the loss is NaN, even if no direction uses all_anchors
        by_q = (factor * 0).expand_as(q.units).clone() if needs[3] else None

    targets, positives = None if problem.targets is None else own_columns(problem), len(problem.positives)
    own_anchors = targets if problem.all_anchors is not None else None
    part = slice(0 if needs[1] else positives, problem.column_count if needs[2] else positives)
    sides = (
        _Side(a, by_a, None, q, q.factor(), by_q, slice(0, len(q.units)), own_anchors, guide_q, problem.anchor_ids),
        _Side(k, by_k, targets, k, k.factor(), by_k, part, targets, guide_k, problem.column_ids),
    )
    loss, by_scale = like.new_zeros(()), like.new_zeros(()) if needs[4] else None
    for pool in pools(problem):
        loss += _pool(problem, pool, sides, scale, factor, by_scale)
    if by_a is not None:
        through_normalisation(by_a, a.units, inverse_a)
    if by_k is not None:
        through_normalisation(by_k, k.units, inverse_k)
    if problem.all_anchors is None:
        by_q = None
    elif by_q is not None:
        through_normalisation(by_q, q.units, inverse_q)
    return loss * factor, (*split(by_a, by_k, len(problem.positives), needs), by_q, by_scale)


def _pool(
    problem: Problem, pool: list[Block], sides: _Sides, scale: float | Tensor, factor: Tensor, by_scale: Tensor | None
) -> Tensor:
    """Return the sum of a pool's losses. Add the gradients of this sum, times `factor`, to `sides` and by_scale."""
    widths, like = [block.width for block in pool], sides[0].rows.units
    cell = like.element_size()
    cell += 0 if problem.guide_anchors is None else wide(problem.guide_anchors.dtype).itemsize
    cell += like.element_size() if isinstance(sides[0].factor, Halves) else 0
    min_rows, size = (chunks.ROWS, chunks.BUFFER) if like.is_cuda else (1, BUFFER)
    step = min(len(like), max(min_rows, size // (sum(widths) * cell)))
    buffer, total = like.new_empty(step, sum(widths)), like.new_zeros(())
    subtract_max = isinstance(scale, Tensor) or scale + problem.strength > UNSHIFTED_SCALE
    gradient = by_scale is not None or any(x is not None for side in sides for x in (side.by_rows, side.by_columns))
    for start in range(0, len(like), step):
        chunk = slice(start, min(start + step, len(like)))
        x = buffer[: chunk.stop - start]
        parts = x.split(widths, 1)
        rows = {side: _select(sides[side].rows, sides[side].places, chunk) for side in {b.from_documents for b in pool}}
        own = _logits(problem, pool, sides, chunk, rows, scale, parts)

        own_logit = parts[0].gather(1, own)
        shift = torch.zeros_like(own_logit)
        if subtract_max:
            shift = x.amax(1, keepdim=True)
            x.sub_(shift)
        # Leave the positive out of the sum: with it, the sum's rounding error could be larger than a small loss.
        x.exp_()
        parts[0].scatter_(1, own, 0)
        neg_sum, own_exp = x.sum(1, keepdim=True), (own_logit - shift).exp_()
        total += losses(neg_sum, own_exp, shift, own_logit).sum()
        if not gradient:
            continue
        parts[0].scatter_(1, own, -neg_sum)
        _products(pool, sides, chunk, rows, parts, scale, factor / (neg_sum + own_exp), by_scale)
    return total


def _products(
    pool: list[Block],
    sides: _Sides,
    chunk: slice,
    rows: dict[bool, UnitRows],
    parts: tuple[Tensor, ...],
    scale: float | Tensor,
    weight: Tensor,
    by_scale: Tensor | None,
) -> None:
    """Add a chunk's gradients to `sides` and by_scale. The gradient of the logits is `weight` x `parts`."""
    for block, x in zip(pool, parts, strict=True):
        row_side, col_side = sides[block.from_documents], sides[block.to_documents]
        units, weights = rows[block.from_documents].units, halves(x) if isinstance(col_side.factor, Halves) else x
        if row_side.by_rows is not None or by_scale is not None:
            products = multiply(weights, col_side.factor[: block.width])
            if by_scale is not None:
                by_scale += torch.linalg.vecdot(products, units).dot(weight[:, 0])
            if row_side.by_rows is not None:
                if row_side.places is None:
                    row_side.by_rows[chunk].addcmul_(products, scale * weight)
                else:
                    add_rows(row_side.by_rows, row_side.places[chunk], products.mul_(scale * weight))
        part = slice(col_side.part.start, min(col_side.part.stop, block.width))
        if col_side.by_columns is not None and part.start < part.stop:
            multiply(weights[:, part].T, units * (scale * weight), col_side.by_columns[part])


def _logits(
    problem: Problem,
    pool: list[Block],
    sides: _Sides,
    chunk: slice,
    rows: dict[bool, UnitRows],
    scale: float | Tensor,
    parts: tuple[Tensor, ...],
) -> Tensor:
    """Write the logits to `parts`, with -inf for excluded columns. Return the index (n, 1) of each row's own column in
    parts[0]."""
    threshold = None
    for block, x in zip(pool, parts, strict=True):
        row_side, col_side = sides[block.from_documents], sides[block.to_documents]
        own = _places(col_side.own, chunk, x.device)[:, None]
        columns = col_side.columns[: block.width]
        if problem.hardness and not block.from_documents and block.to_documents:
            _write_hard_logits(problem, rows[False], columns, own, scale, x)
        else:
            cosines(rows[block.from_documents], columns, scale, x)
        own_logit = x.gather(1, own) if block.pairs else None

        mask = _ignore_mask(problem, block, sides, chunk)
        if row_side.guide is not None and col_side.guide is not None:
            guide_cosines = cosines(_select(row_side.guide, row_side.own, chunk), col_side.guide[: block.width])
            if threshold is None:
                threshold = guide_threshold(problem, guide_cosines.gather(1, own))
            guide_mask = guide_cosines > threshold
            mask = guide_mask if mask is None else guide_mask.logical_or_(mask)
        if mask is not None:
            x.masked_fill_(mask, -torch.inf)
        if own_logit is None:
            x.scatter_(1, of_one_query(problem, own[:, 0], block.width) if block.to_documents else own, -torch.inf)
        elif mask is not None:
            x.scatter_(1, own, own_logit)
    return _places(sides[pool[0].to_documents].own, chunk, parts[0].device)[:, None]


def _write_hard_logits(
    problem: Problem, rows: UnitRows, columns: UnitRows, own: Tensor, scale: float | Tensor, x: Tensor
) -> None:
    """Write the logits (anchors x documents) to `x`, and raise the logits that the hardness mode selects. First compute
    all logits with the scale of the larger group (raised or unraised logits). Then correct the logits of the smaller
    group."""
    raised_scale = scale + problem.strength
    documents = own if problem.hardness == "all_negatives" else of_one_query(problem, own[:, 0], x.shape[1])
    if problem.hardness == "hard_negatives":
        documents, common_scale, other_scale = documents[:, 1:], scale, raised_scale
    else:
        common_scale, other_scale = raised_scale, scale
    cosines(rows, columns, common_scale, x)
    x.scatter_(1, documents, x.gather(1, documents) * (other_scale / common_scale))


def _ignore_mask(problem: Problem, block: Block, sides: _Sides, chunk: slice) -> Tensor | None:
    """Return a bool mask (n, width) for a chunk's rows, True for columns that `ignore` excludes, or None if the call
    has no `ignore`."""
    row_side, col_side = sides[block.from_documents], sides[block.to_documents]
    if row_side.ids is not None and col_side.ids is not None:
        back = block.pairs and block.from_documents
        return equal_ids(_select(row_side.ids, row_side.own, chunk), col_side.ids[: block.width], back)
    if problem.ignored is None or not block.from_documents:
        return None if problem.ignored is None else problem.ignored[chunk]
    return problem.ignored[:, _places(row_side.own, chunk, problem.ignored.device)].T


def _select(x: Any, places: Tensor | None, chunk: slice) -> Any:
    """Return x[places[chunk]], or x[chunk] if places is None, for a tensor or UnitRows."""
    return x[chunk] if places is None else x[places[chunk]]


def _places(places: Tensor | None, chunk: slice, device: torch.device) -> Tensor:
    return torch.arange(chunk.start, chunk.stop, device=device) if places is None else places[chunk]
