"""Pairwise losses with one sort and logcumsumexp in plain torch, without a B x B matrix, on any device.

Let x_i + y_j be the exponent of the pair (i, j). The partners of j are all i for which (i, j) is in the sum, and the
partners of i are all such j. If the sentence pairs are sorted by score, j's partners are all pairs up to some position
or, with labels, some of these pairs (see this folder's README).

    P_j = logsumexp of x over j's partners      log Z = logsumexp_j (P_j + y_j)       L = log(1 + Z)
    Q_i = logsumexp of y over i's partners      dL/dx_i = exp(x_i + Q_i - L)          dL/dy_j = exp(y_j + P_j - L)

Every step is a tensor operation of fixed shape, and the host never reads a value from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .._contract import Gradients, Needs
from .._dtypes import wide
from .._running import logcumsumexp
from .problem import Problem, by_row
from .reference import CLIP

MASKED_CLASSES = 16  # up to this many distinct labels, the cheapest method is one masked cumulative sum per label
# With more labels, at most this many levels, and at most this many levels x pairs, are processed together, to limit the
# memory.
LEVELS_AT_ONCE, ELEMENTS_AT_ONCE = 4, 2**20


@by_row
def forward(problem: Problem, needs: Needs, classes: int | None = None) -> tuple[Tensor, Gradients]:
    """Return the losses and their gradients with respect to similarity, both (2, B) with problem.parts, else (B,).

    `classes` is an upper bound on the number of distinct labels, if the caller knows one. By default, distinct labels
    are counted if the labels are on a CPU. On other devices, the algorithm is chosen without the number of labels,
    because counting the labels would synchronize with the device.
    """
    similarity, labels, scale, need_grad = problem.similarity, problem.labels, problem.scale, needs[0]
    scores, order = torch.sort(problem.scores, stable=True)  # NaN comes last
    c = similarity.to(wide(similarity.dtype))[order]
    changes = scores[1:] != scores[:-1]
    first, last = _runs(changes)
    parts: list[tuple[float, Tensor, Tensor | None]] = []
    if problem.rank:
        x = scale * (c - c.max())
        ranks = _doubled_ranks(changes, first, last, problem.ties)
        end = torch.searchsorted(ranks, ranks - problem.threshold, right=True)
        start = torch.searchsorted(ranks, ranks + problem.threshold)
        loss, slope = _log_one_plus(x, -x, _before(x, end), _from(-x, start), need_grad)
        parts.append((problem.rank_weight, loss, slope))
    if problem.angle:
        theta = c.clamp(-1 + CLIP, 1 - CLIP).acos()
        y = scale * (theta - theta.min())
        if labels is None:
            partners = _before(-y, first), _from(y, last + 1)
        else:
            partners = _label_sums(-y, y, first, last + 1, labels[order], classes)
        loss, slope = _log_one_plus(-y, y, *partners, need_grad)
        parts.append((problem.angle_weight, loss, None if slope is None else _through_angle(c, slope)))
    return _assemble(parts, scores, order, problem, need_grad)


def _runs(changes: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each position, the first and the last position of its run of equal scores."""
    size = len(changes) + 1
    position = torch.arange(size, device=changes.device)
    first = torch.cat([position[:1], torch.where(changes, position[1:], 0)]).cummax(0).values
    last = torch.cat([torch.where(changes, position[:-1], size - 1), position[-1:]]).flip(0).cummin(0).values.flip(0)
    return first, last


def _doubled_ranks(changes: Tensor, first: Tensor, last: Tensor, ties: str) -> Tensor:
    """Return the doubled ranks (2 x rank) of the scores in sorted order. They never decrease, under any tie rule."""
    if ties == "average":
        return first + last
    if ties == "min":
        return 2 * first
    if ties == "max":
        return 2 * last
    if ties == "ordinal":
        return 2 * torch.arange(len(first), device=first.device)
    return 2 * torch.cat([changes.new_zeros(1), changes]).cumsum(0)  # dense


def _before(x: Tensor, end: Tensor) -> Tensor:
    """Return logsumexp of x[..., :end], or -inf where end = 0."""
    sums = logcumsumexp(x).gather(-1, (end - 1).clamp(min=0))
    return sums.masked_fill(end == 0, -torch.inf)


def _from(y: Tensor, start: Tensor) -> Tensor:
    """Return logsumexp of y[..., start:], or -inf where the range is empty."""
    size = y.shape[-1]
    return _before(y.flip(-1), size - start)


def _log_one_plus(x: Tensor, y: Tensor, below: Tensor, above: Tensor, need_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Return L = log(1 + Z) and dL/dx - dL/dy by this module's formulas, with P = `below` and Q = `above`."""
    log_terms = y + below
    log_z = log_terms.logsumexp(0)
    loss = torch.logaddexp(log_z, torch.zeros_like(log_z))
    if not need_grad:
        return loss, None
    return loss, (x + above - loss).exp() - (log_terms - loss).exp()


def _through_angle(c: Tensor, by_minus_theta: Tensor) -> Tensor:
    """Return dL/dc = dL/d(-theta) / sqrt(1 - c^2), or 0 where c is clipped. The factor 1 - c^2 is computed as (1 - c)(1
    + c), which is more accurate for c near +-1."""
    unclipped = (c > -1 + CLIP) & (c < 1 - CLIP)
    slope = ((1 - c) * (1 + c)).rsqrt()
    return torch.where(unclipped, by_minus_theta * slope, by_minus_theta * 0)  # x * 0, not 0: a NaN must stay NaN


def _assemble(
    parts: list[tuple[float, Tensor, Tensor | None]],
    scores: Tensor,
    order: Tensor,
    problem: Problem,
    need_grad: bool,
) -> tuple[Tensor, Gradients]:
    """Return the weighted losses, and their gradients in the caller's order. If a score is NaN, all results are NaN."""
    poison = torch.where(scores[-1].isnan(), torch.nan, 0.0)
    losses = torch.stack([weight * loss + poison for weight, loss, _ in parts])
    if not problem.parts:
        losses = losses.sum(0)
    if not need_grad:
        return losses, (None,)
    slopes = torch.stack([problem.scale * weight * slope + poison for weight, _, slope in parts if slope is not None])
    if not problem.parts:
        slopes = slopes.sum(0)
    return losses, (torch.empty_like(slopes).index_copy_(-1, order, slopes),)


def _label_sums(
    x: Tensor, y: Tensor, first: Tensor, end: Tensor, labels: Tensor, classes: int | None
) -> tuple[Tensor, Tensor]:
    """Return P and Q for pairs that labels restrict. P_j is the logsumexp of x over all i that have a larger label than
    j and are before j's run of equal scores. Q_i is the logsumexp of y over all j that have a smaller label than i and
    are after i's run."""
    values, order = labels.sort(stable=True)
    changes = values[1:] != values[:-1]
    if classes is None and labels.device.type == "cpu" and not torch._C._are_functorch_transforms_active():
        classes = int(changes.sum()) + 1
    if classes is None or classes > MASKED_CLASSES:
        return _sums_by_halves(x, y, first, end, order)
    numbers = torch.cat([order.new_zeros(1), changes.cumsum(0)])
    ids = torch.empty_like(numbers).scatter_(0, order, numbers)  # distinct labels are numbered 0, 1, … in their order
    boundary = torch.arange(classes - 1, device=ids.device)[:, None]
    label_mask = ids > boundary  # row k splits the labels into 0..k and k+1..
    below = _before(x.masked_fill(~label_mask, -torch.inf), first.expand(label_mask.shape))
    above = _from(y.masked_fill(label_mask, -torch.inf), end.expand(label_mask.shape))
    empty = x.new_full((1, len(x)), -torch.inf)  # no label is above the largest or below the smallest
    below, above = torch.cat([below, empty]), torch.cat([empty, above])
    return below.gather(0, ids[None])[0], above.gather(0, ids[None])[0]


def _sums_by_halves(x: Tensor, y: Tensor, first: Tensor, end: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return P and Q of _label_sums for any number of labels. `order` is the stable argsort of the labels.

    Let the place of a pair be its position in `order`. Since `order` is stable, the pair (i, j) is in the sum if and
    only if i is before j's run and has a larger place. Places are divided into blocks and halves as in a merge sort.
    Let b be the highest bit in which the places of i and j differ. Both places are then in the same block of 2^(b+1)
    places, i in its right half and j in its left half. So at every bit, j reads a sum over the first positions of the
    right half, and i reads a sum over the last positions of the left half. Halves have equal sizes, so one cumulative
    sum over a matrix computes the running sums over all halves of a level.
    """
    size = len(x)
    levels = (size - 1).bit_length()
    width = 1 << levels
    position = torch.arange(width, device=x.device)
    place = torch.cat([torch.empty_like(order).scatter_(0, order, position[:size]), position[size:]])
    empty = torch.finfo(x.dtype).min / 2  # not -inf: in forward AD, torch's logsumexp of -inf alone has a NaN tangent
    x, y = (functional.pad(each, (0, width - size), value=empty) for each in (x, y))
    # Left halves are sorted backwards, so that sums over their last positions become prefix sums, too.
    forwards, backwards = functional.pad(first, (0, width - size)), width - functional.pad(end, (0, width - size))
    below, above = torch.full_like(x, empty), torch.full_like(y, empty)
    at_once = max(LEVELS_AT_ONCE, ELEMENTS_AT_ONCE >> levels)
    for low in range(0, levels, at_once):
        bits = torch.arange(low, min(low + at_once, levels), device=x.device)[:, None]
        half = place >> bits
        is_right = (half & 1).bool()
        keys, index = ((half << levels) + torch.where(is_right, position, width - 1 - position)).sort(1)
        values = torch.where(is_right, x, y).gather(1, index)
        sums = [logcumsumexp(row.view(-1, 1 << bit)).view(-1) for bit, row in enumerate(values, low)]
        other = half ^ 1
        stop = torch.searchsorted(keys, (other << levels) + torch.where(is_right, backwards, forwards))
        read = torch.stack(sums).gather(1, (stop - 1).clamp(min=0)).masked_fill(stop <= other << bits, empty)
        below = torch.logaddexp(below, read.masked_fill(is_right, empty).logsumexp(0))
        above = torch.logaddexp(above, read.masked_fill(~is_right, empty).logsumexp(0))
    return below[:size], above[:size]
