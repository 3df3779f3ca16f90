"""Reference implementation of the listwise ops for any dtype and device, computed list by list."""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Gradients, Needs
from .._dtypes import wide
from .problem import Problem, Refinement, mean_of_lists


def forward(problem: Problem, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the loss in Eq. 8-9: the mean over lists of the sum over items of -log P(item is first among the remaining
    items)."""
    student, teacher, mask, order, scale = problem
    scores = scale * student.to(wide(student.dtype))
    loss = scores.new_zeros(())
    grad = torch.zeros_like(scores)
    for row, (s, targets) in enumerate(zip(scores, teacher.tolist(), strict=True)):
        items = [k for k in range(len(targets)) if mask is None or mask[row, k]]
        order_keys = [0.0] * len(targets) if order is None else order[row].tolist()
        items.sort(key=lambda k: (-targets[k], order_keys[k]))
        for place, item in enumerate(items):
            remaining = items[place:]
            loss = loss + s[remaining].logsumexp(0) - s[item]
            grad[row, remaining] += s[remaining].softmax(0)
            grad[row, item] -= 1
    return mean_of_lists(problem, loss, scale * grad if needs[0] else None)


def refine(problem: Refinement, needs: Needs) -> tuple[Tensor, Gradients]:
    """Return the similarities refined by Eq. 6-7. A similarity is raised if its true rank is better than its rank by
    similarity, and lowered if its true rank is worse."""
    phi, mask, omega = problem
    phi = phi.to(wide(phi.dtype))
    refined = torch.zeros_like(phi)
    for chain in range(phi.shape[0]):
        sentences = [k for k in range(phi.shape[1]) if mask is None or mask[chain, k]]
        for place, j in enumerate(sentences):
            items = sentences[place:]
            values = phi[chain, j, items]
            by_similarity = values.sort(descending=True, stable=True)
            rank = by_similarity.indices.argsort()
            for true_rank, k in enumerate(items):
                value = values[true_rank]
                distance = (value - by_similarity.values[true_rank]).abs()
                step = torch.log(omega * distance + 1)
                sign = (true_rank < rank[true_rank]).int() - (true_rank > rank[true_rank]).int()
                new = values.sum() * torch.nan if values.isnan().any() else value + sign * step
                refined[chain, j, k] = refined[chain, k, j] = new
    return refined, ()
