"""info_nce_loss of several widths, a chunk of rows at a time; each pass multiplies every column once.

Products over the columns between two widths (a segment) add up to the logits of all widths: x_k = scale (dot_1 + … +
dot_k) / (|a| |b|), with the norms of the prefix. Segment s belongs to the widths k >= s. With g_k the gradient of L_k
by dot_k, the segment's gradient is one product, (g_s + … + g_K) b, and its transpose for the other side. The gradient
through the norms needs <dL_k/dx_k, x_k> of each row and column. Several widths cost three products, as one width does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..._dtypes import wide
from ..._problems import Gradients, Needs
from ..._widths import from_here_on, segments
from ..problem import EPS, Problem, add_rows, is_ignored, losses, mean_factor, own_columns, split

# Bytes of all widths' logits: enough rows for products at full speed, and few enough for a CPU's last-level cache.
BUFFER = 24 << 20
ROWS = 256  # most rows of a chunk: more do not make the products faster
# Segments of up to this many columns are stored column by column: with many short rows, products run at half the speed
# and sums at a third.
NARROW = 32


class _Side(NamedTuple):
    """The rows or the columns of the logits.

    rows      for each segment (n, its columns), not normalised, in the dtype of the arithmetic
    inverse   (K, n): 1 / norm of each prefix, 0 where it counts as zero
    by        as rows: sums of the gradients through the products; empty if not needed
    along     (K, n): sums of weight dL/dx x over the other side
    whole     (n, D): the matrix into which the wide segments of `by` are views
    """

    rows: list[Tensor]
    inverse: Tensor
    by: list[Tensor]
    along: Tensor
    whole: Tensor | None


# (products, scale / |row|, 1 / |column|, own columns, columns left out, weights, `along` of the columns) -> losses and
# `along` of the rows, both (K, n); see `weigh_in_torch`.
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]


def forward(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: Needs, weigh: Weigh | None = None
) -> tuple[Tensor, Gradients]:
    """Compute losses and gradients as autograd.py describes. `weigh` is native.weigh, by default weigh_in_torch."""
    weigh = weigh or weigh_in_torch
    a, poison_a = _side((problem.anchors,), dims, needs[0])
    k, poison_k = _side((problem.positives, problem.negatives), dims, needs[1] or needs[2])
    factor = mean_factor(problem, poison_a + poison_k)
    targets, positives = own_columns(problem), len(problem.positives)
    wanted = slice(0 if needs[1] else positives, problem.column_count if needs[2] else positives)
    here = weights * factor if any(needs) else None
    total = _direction(a, k, targets, problem.scale, here, lambda chunk: is_ignored(problem, chunk), wanted, weigh)
    if problem.symmetric:
        own = torch.arange(len(problem.anchors), device=targets.device)
        rows, by = [x[targets] for x in k.rows], [torch.zeros_like(x) for x in a.rows if k.by]
        found = _Side(rows, k.inverse[:, targets].contiguous(), by, torch.zeros_like(a.along), None)
        total = total + _direction(
            found, a, own, problem.scale, here, lambda chunk: _ignored_back(problem, targets[chunk]), slice(None), weigh
        )
        for sums, more in zip(k.by, by, strict=True):
            add_rows(sums, targets, more)
        add_rows(k.along.t(), targets, found.along.t())
    of_anchors, of_columns = _finished(a, dims, problem.anchors), _finished(k, dims, problem.positives)
    return total * factor, split(of_anchors, of_columns, positives, needs)


def _direction(
    side: _Side,
    found: _Side,
    targets: Tensor,
    scale: float,
    weights: Tensor | None,
    ignored: Callable[[slice], Tensor | None],
    wanted: slice,
    weigh: Weigh,
) -> Tensor:
    """Return (K,) sums of the rows' losses, and add `weights` times their gradients to the sides' sums."""
    anchors, count, like = len(side.rows[0]), len(found.rows[0]), found.rows[0]
    widths = len(found.rows)
    step = max(1, min(anchors, ROWS, BUFFER // (widths * count * like.element_size())))
    step = -(-anchors // -(-anchors // step))  # equal chunks
    buffer = like.new_empty(widths * step * count)
    of_rows, total = side.inverse * scale, like.new_zeros(widths)
    for start in range(0, anchors, step):
        chunk = slice(start, min(start + step, anchors))
        here = [_along(x[chunk]) for x in side.rows]
        products = buffer[: widths * len(here[0]) * count].view(widths, len(here[0]), count)
        for rows, columns, dots in zip(here, found.rows, products, strict=True):
            torch.mm(rows, columns.T, out=dots)
        left_out = ignored(chunk)
        left_out = None if left_out is None else left_out.contiguous()
        made, along = weigh(
            products, of_rows[:, chunk].contiguous(), found.inverse, targets[chunk], left_out, weights, found.along
        )
        total += made.sum(1)
        if along is None:
            continue
        side.along[:, chunk] = along
        for by, columns, dots in zip(side.by, found.rows, products, strict=False):
            torch.mm(dots, columns, out=by[chunk])
        for by, rows, dots in zip(found.by, here, products, strict=False):
            by[wanted].addmm_(dots[:, wanted].T, rows)
    return total


def weigh_in_torch(
    products: Tensor,
    of_rows: Tensor,
    of_columns: Tensor,
    own: Tensor,
    left_out: Tensor | None,
    weights: Tensor | None,
    along_columns: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows' losses from the segments' products (K, n, C). If weights are given, replace the products by
    their gradients, summed over the widths; also return the rows' sums of <dL/dx, x>, and add the columns' sums."""
    own, found, along_rows = own[:, None], [], []
    for before, after in pairwise(products):
        after += before
    x, share = torch.empty_like(products[0]), None
    for k, dots in enumerate(products):
        torch.mul(dots, of_rows[k, :, None], out=x).mul_(of_columns[k])
        at_own = x.gather(1, own)
        if left_out is not None:
            x.masked_fill_(left_out, -torch.inf).scatter_(1, own, at_own)
        shift = x.amax(1, keepdim=True)
        # Leave the positive out of the sum, which then has the size of the loss, so that a small loss keeps its digits.
        others = x.sub_(shift).exp_().scatter_(1, own, 0).sum(1, keepdim=True)
        of_own = (at_own - shift).exp_()
        found.append(losses(others, of_own, shift, at_own)[:, 0])
        if weights is None:
            continue
        x.scatter_(1, own, -others).mul_(weights[k] * of_rows[k, :, None] / (others + of_own)).mul_(of_columns[k])
        share = torch.mul(x, dots, out=share)
        along_rows.append(share.sum(1))
        along_columns[k] += share.sum(0)
        dots.copy_(x)
    if weights is None:
        return torch.stack(found), None
    for wider, narrower in pairwise(products.unbind()[::-1]):
        narrower += wider
    return torch.stack(found), torch.stack(along_rows)


def _side(parts: tuple[Tensor | None, ...], dims: tuple[int, ...], need: bool) -> tuple[_Side, Tensor]:
    """Return a side, and (K,) zeros with NaN where a prefix or its norm is not finite."""
    given = [x[:, : dims[-1]] for x in parts if x is not None]
    whole = torch.cat(given) if len(given) > 1 else given[0]
    whole = whole.to(wide(whole.dtype))
    rows = [_along(whole[:, segment]) for segment in segments(dims)]
    norms = torch.stack([torch.linalg.vecdot(x, x) for x in rows]).cumsum(0).sqrt_()
    inverse = (1 / norms).masked_fill(norms <= EPS, 0)
    by = torch.zeros_like(whole) if need else None
    parts_of_by = [] if by is None else [_along(by[:, segment]) for segment in segments(dims)]
    return _Side(rows, inverse, parts_of_by, torch.zeros_like(norms), by), (norms * 0).sum(1)


def _along(columns: Tensor) -> Tensor:
    """Store a narrow segment column by column, and leave a wide one unchanged; see NARROW."""
    return columns.T.contiguous().T if columns.shape[1] <= NARROW else columns


def _finished(side: _Side, dims: tuple[int, ...], given: Tensor) -> Tensor | None:
    """Finish the gradient of the given rows: subtract the part through their norms, append 0 beyond the last width."""
    if side.whole is None:
        return None
    through = from_here_on(side.along * side.inverse.square())
    for segment, rows, by, share in zip(segments(dims), side.rows, side.by, through, strict=True):
        torch.addcmul(by, rows, share[:, None], value=-1, out=side.whole[:, segment])
    missing = given.shape[1] - dims[-1]
    return torch.nn.functional.pad(side.whole, (0, missing)) if missing else side.whole


def _ignored_back(problem: Problem, rows: Tensor) -> Tensor | None:
    """Return (n, N) bool for the columns `rows`: the anchors for which they are excluded as negatives."""
    if problem.anchor_ids is not None and problem.column_ids is not None:
        return problem.column_ids[rows, None] == problem.anchor_ids
    return None if problem.ignored is None else problem.ignored[:, rows].T
