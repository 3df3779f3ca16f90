"""info_nce_loss in plain torch, a chunk of rows at a time: one bounded buffer of logits, and no matrix of them.

The loss is a mean over the rows, so the gradient of a chunk is complete as soon as its logits are: three matrix
products through BLAS a block (logits, rows' gradient, columns' gradient), all made in forward. chunks.py has them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dtypes import wide
from .._problems import Gradients, backward
from . import chunks
from .chunks import Halves, UnitRows, cosines, halves, multiply, unit_rows
from .problem import (
    Block,
    Problem,
    add_rows,
    losses,
    lowered,
    mean_factor,
    of_one_query,
    own_columns,
    pools,
    split,
    through_normalisation,
)

__all__ = ["backward", "forward"]

# Bytes of the buffer: enough rows for a matrix product to run at full speed (512 of 32,768 columns in float32).
BUFFER = 64 << 20
# Up to this scale, exp(+-scale) and sums of it are far from float32's ends: nothing need be subtracted before exp.
UNSHIFTED_SCALE = 40.0


class _Side(NamedTuple):
    """Anchors, or documents: unit rows and the sums of their gradients, once for what looks and once for what is found.

    places    which of `rows` the N rows are; own: which of `columns`, of `guide` and so on; None: the i-th is
    factor    the columns, to be multiplied by weights
    wanted    the columns whose gradient is
    """

    rows: UnitRows
    by_rows: Tensor | None
    places: Tensor | None
    columns: UnitRows
    factor: Tensor | Halves
    by_columns: Tensor | None
    wanted: slice
    own: Tensor | None
    guide: UnitRows | None
    ids: Tensor | None


_Sides = tuple[_Side, _Side]  # anchors, documents: by a Block's from_documents and to_documents


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """The loss, and the gradients that are needed, in float64 for float64 rows and in float32 otherwise."""
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
    scale = problem.scale if problem.learnt_scale is None else problem.learnt_scale.to(like.dtype)
    factor = mean_factor(problem, poison)
    by_q = by_a
    if problem.all_anchors is not None:  # NaN where the loss is, if no direction looks for them too
        by_q = (factor * 0).expand_as(q.units).clone() if needs[3] else None

    targets, positives = None if problem.targets is None else own_columns(problem), len(problem.positives)
    own_anchors = targets if problem.all_anchors is not None else None
    wanted = slice(0 if needs[1] else positives, problem.column_count if needs[2] else positives)
    sides = (
        _Side(a, by_a, None, q, q.factor(), by_q, slice(0, len(q.units)), own_anchors, guide_q, problem.anchor_ids),
        _Side(k, by_k, targets, k, k.factor(), by_k, wanted, targets, guide_k, problem.column_ids),
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
    """Sum of the rows' losses; factor times its gradients is added to the sides' sums and to by_scale."""
    widths, like = [block.width for block in pool], sides[0].rows.units
    cell = like.element_size()
    cell += 0 if problem.guide_anchors is None else wide(problem.guide_anchors.dtype).itemsize
    cell += like.element_size() if isinstance(sides[0].factor, Halves) else 0
    fewest, size = (chunks.ROWS, chunks.BUFFER) if like.is_cuda else (1, BUFFER)
    step = min(len(like), max(fewest, size // (sum(widths) * cell)))
    buffer, total = like.new_empty(step, sum(widths)), like.new_zeros(())
    shifted = isinstance(scale, Tensor) or scale + problem.strength > UNSHIFTED_SCALE
    gradient = by_scale is not None or any(x is not None for side in sides for x in (side.by_rows, side.by_columns))
    for start in range(0, len(like), step):
        chunk = slice(start, min(start + step, len(like)))
        x = buffer[: chunk.stop - start]
        parts = x.split(widths, 1)
        rows = {side: _of(sides[side].rows, sides[side].places, chunk) for side in {b.from_documents for b in pool}}
        own = _logits(problem, pool, sides, chunk, rows, scale, parts)

        at_own = parts[0].gather(1, own)
        shift = torch.zeros_like(at_own)
        if shifted:
            shift = x.amax(1, keepdim=True)
            x.sub_(shift)
        # The positive stays out of the sum: what is left is the loss's own size, and keeps its digits.
        x.exp_()
        parts[0].scatter_(1, own, 0)
        others, of_own = x.sum(1, keepdim=True), (at_own - shift).exp_()
        total += losses(others, of_own, shift, at_own).sum()
        if not gradient:
            continue
        parts[0].scatter_(1, own, -others)
        _products(pool, sides, chunk, rows, parts, scale, factor / (others + of_own), by_scale)
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
    """Adds the gradients by a chunk's unit rows, by columns and by scale, weight x parts being those by the logits."""
    for block, x in zip(pool, parts, strict=True):
        side, found, here = sides[block.from_documents], sides[block.to_documents], rows[block.from_documents].units
        weights = halves(x) if isinstance(found.factor, Halves) else x
        if side.by_rows is not None or by_scale is not None:
            made = multiply(weights, found.factor[: block.width])
            if by_scale is not None:
                by_scale += torch.linalg.vecdot(made, here).dot(weight[:, 0])
            if side.by_rows is not None:
                if side.places is None:
                    side.by_rows[chunk].addcmul_(made, scale * weight)
                else:
                    add_rows(side.by_rows, side.places[chunk], made.mul_(scale * weight))
        wanted = slice(found.wanted.start, min(found.wanted.stop, block.width))
        if found.by_columns is not None and wanted.start < wanted.stop:
            multiply(weights[:, wanted].T, here * (scale * weight), found.by_columns[wanted])


def _logits(
    problem: Problem,
    pool: list[Block],
    sides: _Sides,
    chunk: slice,
    rows: dict[bool, UnitRows],
    scale: float | Tensor,
    parts: tuple[Tensor, ...],
) -> Tensor:
    """The logits to `parts`, -inf where they are left out, and (n, 1) the own pair's column in the first part."""
    threshold = None
    for block, x in zip(pool, parts, strict=True):
        side, found = sides[block.from_documents], sides[block.to_documents]
        own, columns = _places(found.own, chunk, x.device)[:, None], found.columns[: block.width]
        if problem.hardness and not block.from_documents and block.to_documents:
            _hardened(problem, rows[False], columns, own, scale, x)
        else:
            cosines(rows[block.from_documents], columns, scale, x)
        at_own = x.gather(1, own) if block.pairs else None

        left_out = _ignored(problem, block, sides, chunk)
        if side.guide is not None and found.guide is not None:
            guided = cosines(_of(side.guide, side.own, chunk), found.guide[: block.width])
            if threshold is None:
                threshold = lowered(problem, guided.gather(1, own))
            above = guided > threshold
            left_out = above if left_out is None else above.logical_or_(left_out)
        if left_out is not None:
            x.masked_fill_(left_out, -torch.inf)
        if at_own is None:
            x.scatter_(1, of_one_query(problem, own[:, 0], block.width) if block.to_documents else own, -torch.inf)
        elif left_out is not None:
            x.scatter_(1, own, at_own)
    return _places(sides[pool[0].to_documents].own, chunk, parts[0].device)[:, None]


def _hardened(
    problem: Problem, rows: UnitRows, columns: UnitRows, own: Tensor, scale: float | Tensor, x: Tensor
) -> None:
    """Logits of anchors with documents to `x`, the hard ones raised: whichever are more, raised ones or others, are
    products, and the rest is put right."""
    raised = scale + problem.strength
    documents = own if problem.hardness == "all_negatives" else of_one_query(problem, own[:, 0], x.shape[1])
    if problem.hardness == "hard_negatives":
        documents, most, others = documents[:, 1:], scale, raised
    else:
        most, others = raised, scale
    cosines(rows, columns, most, x)
    x.scatter_(1, documents, x.gather(1, documents) * (others / most))


def _ignored(problem: Problem, block: Block, sides: _Sides, chunk: slice) -> Tensor | None:
    """(n, width) bool: columns that the caller calls no negatives of a chunk's rows."""
    side, found = sides[block.from_documents], sides[block.to_documents]
    if side.ids is not None and found.ids is not None:
        return _of(side.ids, side.own, chunk)[:, None] == found.ids[: block.width]
    if problem.ignored is None or not block.from_documents:
        return None if problem.ignored is None else problem.ignored[chunk]
    return problem.ignored[:, _places(side.own, chunk, problem.ignored.device)].T


def _of(x: Any, places: Tensor | None, chunk: slice) -> Any:
    """Rows x[places[chunk]], of a tensor or of UnitRows."""
    return x[chunk] if places is None else x[places[chunk]]


def _places(places: Tensor | None, chunk: slice, device: torch.device) -> Tensor:
    return torch.arange(chunk.start, chunk.stop, device=device) if places is None else places[chunk]
