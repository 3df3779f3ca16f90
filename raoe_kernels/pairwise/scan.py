"""Pairwise losses with one sort and logcumsumexp in plain torch, without a B x B matrix, on any device.

Let x_i + y_j be the exponent of (i, j). The partners of j are all i for which (i, j) is in the sum. In the order of the
scores, j's partners are the pairs up to some position (with labels, some of these; see this folder's README). So:

    P_j = logsumexp of x over j's partners      log Z = logsumexp_j (P_j + y_j)       L = log(1 + Z)
    Q_i = logsumexp of y over i's partners      dL/dx_i = exp(x_i + Q_i - L)          dL/dy_j = exp(y_j + P_j - L)

Every step is a tensor operation of fixed shape, and the host never reads a value from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .._running import logcumsumexp
from .problem import Problem, by_row
from .reference import CLIP

MASKED_CLASSES = 16  # up to this many distinct labels, the cheapest method is one masked cumulative sum per label
LEVELS_AT_ONCE = 4  # with more labels: number of label bits that are processed together, to limit the memory


@by_row
def forward(problem: Problem, needs: Needs, classes: int | None = None) -> tuple[Tensor, Gradients]:
    """Return the losses and their gradients with respect to similarity: (2, B) if problem.parts, otherwise (B,).

    classes: upper bound on the number of distinct labels, if the caller knows one. By default, distinct labels are
    counted on a CPU. On other devices the bound is B, because reading a count would wait for the device.
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
            partners = _label_sums(-y, y, changes, first, last, labels[order], classes)
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
    """Return twice the rank at each sorted position: non-decreasing, and integers under every tie rule."""
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
    """Return L = log(1 + Z) and the difference dL/dx - dL/dy, computed from P = `below` and Q = `above`."""
    log_terms = y + below
    log_z = log_terms.logsumexp(0)
    loss = torch.logaddexp(log_z, torch.zeros_like(log_z))
    if not need_grad:
        return loss, None
    return loss, (x + above - loss).exp() - (log_terms - loss).exp()


def _through_angle(c: Tensor, by_minus_theta: Tensor) -> Tensor:
    """Return dL/dc = dL/d(-theta) / sqrt(1 - c^2), or 0 where c is clipped. (1 - c)(1 + c) is accurate near +-1."""
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
    """Return the weighted losses, and the gradient in the caller's order. All are NaN if a score is NaN."""
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
    x: Tensor, y: Tensor, changes: Tensor, first: Tensor, last: Tensor, labels: Tensor, classes: int | None
) -> tuple[Tensor, Tensor]:
    """Return P and Q if labels restrict the pairs: P_j sums over all i before j's run that have a larger label than
    j, and Q_i sums over all j after i's run that have a smaller label than i."""
    ids, count = _dense_ids(labels)
    if classes is None:
        is_readable = labels.device.type == "cpu" and not torch._C._are_functorch_transforms_active()
        classes = int(count) if is_readable else len(labels)
    if classes <= MASKED_CLASSES:
        boundary = torch.arange(classes - 1, device=ids.device)[:, None]
        label_mask = ids > boundary  # row k splits the labels into 0..k and k+1..
        below = _before(x.masked_fill(~label_mask, -torch.inf), first.expand(label_mask.shape))
        above = _from(y.masked_fill(label_mask, -torch.inf), (last + 1).expand(label_mask.shape))
        empty = x.new_full((1, len(x)), -torch.inf)  # no label is above the largest or below the smallest
        below, above = torch.cat([below, empty]), torch.cat([empty, above])
        return below.gather(0, ids[None])[0], above.gather(0, ids[None])[0]
    below, above = torch.full_like(x, -torch.inf), torch.full_like(y, -torch.inf)
    levels = max(classes - 1, 1).bit_length()
    for low in range(0, levels, LEVELS_AT_ONCE):
        bits = torch.arange(low, min(low + LEVELS_AT_ONCE, levels), device=ids.device)[:, None]
        p, q = _levels(x, y, changes, ids, bits)
        below = torch.logaddexp(below, p.logsumexp(0))
        above = torch.logaddexp(above, q.logsumexp(0))
    return below, above


def _dense_ids(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Number the distinct labels 0, 1, … in ascending order. Return each pair's number, and the count (a tensor)."""
    values, order = labels.sort()
    ids = torch.cat([order.new_zeros(1), (values[1:] != values[:-1]).cumsum(0)])
    return torch.empty_like(ids).scatter_(0, order, ids), ids[-1] + 1


def _levels(x: Tensor, y: Tensor, changes: Tensor, ids: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each bit, the parts of P and Q from partners whose labels differ in this bit and agree in higher
    bits.

    l_i > l_j exactly if at some bit l_i has 1, l_j has 0, and all higher bits agree. So for every bit, the pairs are
    grouped by the higher bits, and each group is in the order of the scores. A pair whose bit is 0 gets in P the sum
    over earlier pairs whose bit is 1. A pair whose bit is 1 gets in Q the sum over later pairs whose bit is 0.
    """
    group, order = (ids >> (bits + 1)).sort(dim=1, stable=True)
    bit_set = (ids[order] >> bits) & 1 == 1
    run = torch.cat([changes.new_zeros(1), changes]).cumsum(0)[order]
    p = _exclusive(x[order].masked_fill(~bit_set, -torch.inf), group, run)
    q = _exclusive(y[order].masked_fill(bit_set, -torch.inf).flip(1), group.flip(1), run.flip(1)).flip(1)
    p, q = p.masked_fill(bit_set, -torch.inf), q.masked_fill(~bit_set, -torch.inf)
    return torch.empty_like(p).scatter_(1, order, p), torch.empty_like(q).scatter_(1, order, q)


def _exclusive(values: Tensor, group: Tensor, run: Tensor) -> Tensor:
    """Return, for each position of a row, the logsumexp of the values in earlier runs of the same group."""
    size = values.shape[1]
    empty = values.new_full((values.shape[0], 1), -torch.inf)
    sums = torch.cat([empty, values[:, :-1]], 1).masked_fill(_starts(group), -torch.inf)
    reach = 1
    while reach < size:  # doubling: sums[p] covers up to `reach` positions of p's group
        same_group = group[:, reach:] == group[:, :-reach]
        extended = torch.logaddexp(sums[:, reach:], sums[:, :-reach].masked_fill(~same_group, -torch.inf))
        sums = torch.cat([sums[:, :reach], extended], 1)
        reach *= 2
    position = torch.arange(size, device=values.device)
    run_start = torch.where(_starts(group) | _starts(run), position, 0).cummax(1).values
    return sums.gather(1, run_start)


def _starts(keys: Tensor) -> Tensor:
    """Return a mask of `keys`: True at the start of a row, and where a key differs from the previous key in the row."""
    return torch.cat([torch.ones_like(keys[:, :1], dtype=torch.bool), keys[:, 1:] != keys[:, :-1]], 1)
