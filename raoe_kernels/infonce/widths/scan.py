"""info_nce_loss of several widths, a chunk of rows at a time, each column in one product a pass.

Products over the columns between two widths (a segment) add up to the logits of all widths: x_k = tau (dot_1 + … +
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
from ..._widths import from_here_on, segments
from ..problem import EPS, Problem, add_rows, losses, own_columns, scale, split

# Bytes of all widths' logits: enough rows for products at full speed, and little enough for a CPU's last cache.
BUFFER = 24 << 20


class _Side(NamedTuple):
    """Rows, or columns.

    rows      (n, D) as given, in the dtype of the arithmetic
    inverse   (K, n): 1 / norm of each prefix, 0 where it counts as zero
    by        (n, D): sums of the gradients by the products, or None
    along     (K, n): sums of weight dL/dx x over the other side
    """

    rows: Tensor
    inverse: Tensor
    by: Tensor | None
    along: Tensor


# (products, tau / |row|, 1 / |column|, own columns, columns left out, weights, along the columns) -> losses, and along
# the rows, (K, n); see `weigh`.
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]


def forward(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """As autograd.py says."""
    return sweep(problem, dims, weights, needs, weigh)


def sweep(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: tuple[bool, ...], weigh: Weigh
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """`forward` of a backend that has `weigh`."""
    a, poison_a = _side((problem.anchors,), dims, needs[0])
    k, poison_k = _side((problem.positives, problem.negatives), dims, needs[1] or needs[2])
    factor = scale(problem, poison_a + poison_k)
    targets, positives = own_columns(problem), len(problem.positives)
    wanted = slice(0 if needs[1] else positives, len(k.rows) if needs[2] else positives)
    here = weights * factor if any(needs) else None
    total = _direction(a, k, targets, dims, problem.tau, here, _ignored(problem), wanted, weigh)
    if problem.symmetric:
        own = torch.arange(len(a.rows), device=a.rows.device)
        by = None if k.by is None else torch.zeros_like(a.rows)
        found = _Side(k.rows[targets], k.inverse[:, targets].contiguous(), by, torch.zeros_like(a.along))
        back = _ignored_back(problem, targets)
        total = total + _direction(found, a, own, dims, problem.tau, here, back, slice(None), weigh)
        if k.by is not None and by is not None:
            add_rows(k.by, targets, by)
        add_rows(k.along.t(), targets, found.along.t())
    grads = split(_finished(a, dims, problem.anchors), _finished(k, dims, problem.positives), problem, needs)
    return total * factor, grads


def _direction(
    side: _Side,
    found: _Side,
    targets: Tensor,
    dims: tuple[int, ...],
    tau: float,
    weights: Tensor | None,
    ignored: Callable[[slice], Tensor] | None,
    wanted: slice,
    weigh: Weigh,
) -> Tensor:
    """(K,) sums of the rows' losses; `weights` times their gradients is added to the sides' sums."""
    count, widths = len(found.rows), len(dims)
    step = max(1, min(len(side.rows), BUFFER // (widths * count * found.rows.element_size())))
    step = -(-len(side.rows) // -(-len(side.rows) // step))  # chunks of one size
    buffer = found.rows.new_empty(widths * step * count)
    of_rows, total = side.inverse * tau, found.rows.new_zeros(widths)
    for start in range(0, len(side.rows), step):
        chunk = slice(start, min(start + step, len(side.rows)))
        here = side.rows[chunk]
        products = buffer[: widths * len(here) * count].view(widths, len(here), count)
        for k, segment in enumerate(segments(dims)):
            torch.mm(here[:, segment], found.rows[:, segment].T, out=products[k])
        left_out = None if ignored is None else ignored(chunk).contiguous()
        made, along = weigh(
            products, of_rows[:, chunk].contiguous(), found.inverse, targets[chunk], left_out, weights, found.along
        )
        total += made.sum(1)
        if along is None:
            continue
        side.along[:, chunk] = along
        for k, segment in enumerate(segments(dims)):
            if side.by is not None:
                torch.mm(products[k], found.rows[:, segment], out=side.by[chunk, segment])
            if found.by is not None:
                found.by[wanted, segment].addmm_(products[k][:, wanted].T, here[:, segment])
    return total


def weigh(
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
    rows = torch.cat(given) if len(given) > 1 else given[0]
    rows = rows.to(wide(rows.dtype))
    pieces = [rows[:, segment] for segment in segments(dims)]
    norms = torch.stack([torch.linalg.vecdot(piece, piece) for piece in pieces]).cumsum(0).sqrt_()
    inverse = (1 / norms).masked_fill(norms <= EPS, 0)
    return _Side(rows, inverse, torch.zeros_like(rows) if need else None, torch.zeros_like(norms)), (norms * 0).sum(1)


def _finished(side: _Side, dims: tuple[int, ...], given: Tensor) -> Tensor | None:
    """The gradient by the rows as given: less what goes through their norms, 0 beyond the widest prefix."""
    if side.by is None:
        return None
    through = from_here_on(side.along * side.inverse.square())
    for k, segment in enumerate(segments(dims)):
        side.by[:, segment].addcmul_(side.rows[:, segment], through[k, :, None], value=-1)
    missing = given.shape[1] - dims[-1]
    return torch.nn.functional.pad(side.by, (0, missing)) if missing else side.by


def _ignored(problem: Problem) -> Callable[[slice], Tensor] | None:
    """Of some anchors, (n, C): columns that are no negatives of theirs."""
    mask, anchor_ids, column_ids = problem.ignored, problem.anchor_ids, problem.column_ids
    if anchor_ids is not None and column_ids is not None:
        return lambda chunk: anchor_ids[chunk, None] == column_ids
    return None if mask is None else lambda chunk: mask[chunk]


def _ignored_back(problem: Problem, targets: Tensor) -> Callable[[slice], Tensor] | None:
    """Of some anchors' positives, (n, N): anchors whose negatives they are not."""
    mask, anchor_ids, column_ids = problem.ignored, problem.anchor_ids, problem.column_ids
    if anchor_ids is not None and column_ids is not None:
        return lambda chunk: column_ids[targets[chunk], None] == anchor_ids
    return None if mask is None else lambda chunk: mask[:, targets[chunk]].T
