"""Reference implementation of info_nce_loss and its gradient for any dtype and device, with all logits in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients
from .problem import (
    Block,
    Problem,
    equal_ids,
    guide_threshold,
    mean_factor,
    of_one_query,
    own_anchors,
    own_columns,
    pools,
    split,
    through_normalisation,
    units_of,
)


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """Return the loss and the gradients that are needed, in float64 for float64 rows, otherwise in float32."""
    a, inverse_a, poison_a = units_of(problem.anchors)
    k, inverse_k, poison_k = units_of(problem.positives, problem.negatives)
    candidates = problem.anchors if problem.all_anchors is None else problem.all_anchors
    q, inverse_q, poison_q = units_of(candidates)
    guide_rows = None
    poison = poison_a + poison_k + poison_q
    if problem.guide_anchors is not None:
        guide_q, _, first = units_of(problem.guide_anchors)
        guide_k, _, second = units_of(problem.guide_positives, problem.guide_negatives)
        guide_rows, poison = (guide_q, guide_k), poison + (first + second)
    factor = mean_factor(problem, poison.to(a.dtype))
    scale = problem.scale if problem.learned_scale is None else problem.learned_scale.to(a.dtype)
    places = own_anchors(problem), own_columns(problem)
    rows, columns = (a, k[places[1]]), (q, k)

    loss = by_scale = a.new_zeros(())
    by_rows, by_columns = [torch.zeros_like(x) for x in rows], [torch.zeros_like(x) for x in columns]
    for pool in pools(problem):
        cosines = [rows[b.from_documents] @ columns[b.to_documents][: b.width].T for b in pool]
        mask = torch.cat(pool_masks(problem, pool, places, guide_rows), 1)
        logits = scale * torch.cat(cosines, 1)
        if problem.hardness and not pool[0].from_documents:
            logits[:, : pool[0].width] += problem.strength * cosines[0].detach() * hard_columns(problem, places[1])
        losses, weights = softmax_loss(logits, places[pool[0].to_documents][:, None], mask)
        loss = loss + losses.sum()
        for block, w, cosine in zip(pool, weights.split([b.width for b in pool], 1), cosines, strict=True):
            by_scale = by_scale + (w * cosine).sum()
            by_rows[block.from_documents] += w @ columns[block.to_documents][: block.width]
            by_columns[block.to_documents][: block.width] += w.T @ rows[block.from_documents]

    by_anchors = by_rows[0] if problem.all_anchors is not None else by_rows[0] + by_columns[0]
    by_documents = by_columns[1].index_add(0, places[1], by_rows[1])
    sums = ((by_anchors, a, inverse_a), (by_documents, k, inverse_k), (by_columns[0], q, inverse_q))
    by_a, by_k, by_q = (through_normalisation(g * (scale * factor), units, inverse) for g, units, inverse in sums)
    rest = by_q if needs[3] else None, by_scale * factor if needs[4] else None
    return loss * factor, (*split(by_a if needs[0] else None, by_k, len(problem.positives), needs), *rest)


def softmax_loss(logits: Tensor, own: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss -log softmax(logits)[own], of shape (n, 1), and its gradient with respect to the logits,
    of shape (n, C). The softmax leaves out the columns where `mask` is True, but never the column `own`."""
    # Differences from the own logit preserve the precision of a small loss. Left-out columns get a finite number whose
    # exp is 0, because the forward-mode derivative of logsumexp is NaN if all columns are -inf.
    negatives = (logits - logits.gather(1, own)).masked_fill(mask, -1e30).scatter(1, own, -1e30)
    log_sum = negatives.logsumexp(1, keepdim=True)
    losses = torch.logaddexp(log_sum, torch.zeros_like(log_sum))
    return losses, (negatives - losses).exp().scatter(1, own, torch.expm1(-losses))


def own(places: Tensor, count: int) -> Tensor:
    """Return a bool mask (n, count) that is True at mask[i, places[i]]. `places` is a tensor of indices, (n,) or (n,
    k)."""
    places = places.reshape(len(places), -1)
    mask = torch.zeros(len(places), count, dtype=torch.bool, device=places.device)
    return mask.scatter_(1, places, True)


def pool_masks(
    problem: Problem, pool: list[Block], places: tuple[Tensor, Tensor], guide_rows: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    """Return a bool mask (N, width) for each block: True for the columns to leave out of a row's softmax."""
    result, threshold = [], None
    ids = problem.anchor_ids, problem.column_ids
    for block in pool:
        mask = torch.zeros(len(places[0]), block.width, dtype=torch.bool, device=places[0].device)
        if problem.anchor_ids is not None:
            row_ids, column_ids = ids[block.from_documents], ids[block.to_documents]
            assert row_ids is not None and column_ids is not None
            back, row_ids = block.pairs and block.from_documents, row_ids[places[block.from_documents]]
            mask |= equal_ids(row_ids, column_ids[: block.width], back)
        if problem.ignored is not None:
            mask |= problem.ignored[:, places[1]].T if block.from_documents else problem.ignored
        if guide_rows is not None:
            of_rows = guide_rows[block.from_documents][places[block.from_documents]]
            cosines = of_rows @ guide_rows[block.to_documents][: block.width].T
            if threshold is None:
                threshold = guide_threshold(problem, cosines.gather(1, places[block.to_documents][:, None]))
            mask |= cosines > threshold
        if block.pairs:
            mask &= ~own(places[block.to_documents], block.width)
        elif block.to_documents:
            mask |= own(of_one_query(problem, places[1], block.width), block.width)
        else:
            mask |= own(places[0], block.width)
        result.append(mask)
    return result


def hard_columns(problem: Problem, targets: Tensor) -> Tensor:
    """Return a bool mask (N, C), True for the columns whose logits get the hardness term (Lan et al. 2025, Eq. 5)."""
    negatives = ~own(targets, problem.column_count)
    if problem.hardness == "all_negatives":
        return negatives
    documents = own(of_one_query(problem, targets, problem.column_count), problem.column_count)
    return negatives & documents if problem.hardness == "hard_negatives" else ~documents
