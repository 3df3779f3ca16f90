"""info_nce_loss of several widths, a chunk of rows at a time, each column in one product a pass.

Products over the columns between two widths (a segment) add up to the logits of all widths: x_k = scale (dot_1 + … +
dot_k) / (|a| |b|), norms being those of the prefix. Segment s is in the widths k >= s: with g_k the gradient of L_k by
dot_k, its own is one product, (g_s + … + g_K) b, and one more, transposed. What goes through the norms is <dL_k/dx_k,
x_k> of each row and column. Three products of all columns for any number of widths, as for one.
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

# Bytes of all widths' logits: enough rows for products at full speed, and little enough for a CPU's last cache.
BUFFER = 24 << 20
ROWS = 256  # more of them make no product faster
# Columns of a segment up to which its products want them along the rows of a matrix: those of a matrix of many short
# rows go at half the speed, and their sums at a third.
NARROW = 32


class _Side(NamedTuple):
    """Rows, or columns.

    rows      of each segment (n, its columns) as given, in the dtype of the arithmetic
    inverse   (K, n): 1 / norm of each prefix, 0 where it counts as zero
    by        as rows: sums of the gradients by the products; none where they are not wanted
    along     (K, n): sums of weight dL/dx x over the other side
    whole     (n, D): what the wide ones of `by` are parts of
    """

    rows: list[Tensor]
    inverse: Tensor
    by: list[Tensor]
    along: Tensor
    whole: Tensor | None


# (products, scale / |row|, 1 / |column|, own columns, columns left out, weights, along the columns) -> losses, and
# along the rows, (K, n); see `weigh_in_torch`.
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]


def forward(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: Needs, weigh: Weigh | None = None
) -> tuple[Tensor, Gradients]:
    """As autograd.py says; `weigh` is the compiled one of native.py, or else this file's."""
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
    """(K,) sums of the rows' losses; `weights` times their gradients is added to the sides' sums."""
    anchors, count, like = len(side.rows[0]), len(found.rows[0]), found.rows[0]
    widths = len(found.rows)
    step = max(1, min(anchors, ROWS, BUFFER // (widths * count * like.element_size())))
    step = -(-anchors // -(-anchors // step))  # chunks of one size
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
    """From the products of the segments, (K, n, C), the rows' losses. With weights the products become the gradients by
    them, sums over the widths that they are in; rows' and columns' shares of <dL/dx, x> are given and added."""
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
        # The positive stays out of the sum: what is left is the loss's own size, and keeps its digits.
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
    """A side, and (K,) 0, or NaN where a prefix is not finite or has no finite norm."""
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
    """(n, narrow) as such a column's rows lie side by side; wide ones as they are."""
    return columns.T.contiguous().T if columns.shape[1] <= NARROW else columns


def _finished(side: _Side, dims: tuple[int, ...], given: Tensor) -> Tensor | None:
    """The gradient by the rows as given: less what goes through their norms, 0 beyond the widest prefix."""
    if side.whole is None:
        return None
    through = from_here_on(side.along * side.inverse.square())
    for segment, rows, by, share in zip(segments(dims), side.rows, side.by, through, strict=True):
        torch.addcmul(by, rows, share[:, None], value=-1, out=side.whole[:, segment])
    missing = given.shape[1] - dims[-1]
    return torch.nn.functional.pad(side.whole, (0, missing)) if missing else side.whole


def _ignored_back(problem: Problem, rows: Tensor) -> Tensor | None:
    """Of some anchors' positives, (n, N): anchors whose negatives they are not."""
    if problem.anchor_ids is not None and problem.column_ids is not None:
        return problem.column_ids[rows, None] == problem.anchor_ids
    return None if problem.ignored is None else problem.ignored[:, rows].T
