"""From a Problem to pools and blocks: which cosines a softmax is over, and which of them are left out.

A pool is what one softmax is over. Its blocks are the directions: logits of the row's anchor, or of its positive, with
all anchors, or with positives and negatives. The own pair is in the first block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Problem

# The own pair's first: a pool begins with a block that has it.
DIRECTIONS = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc", "positive_to_positive")


class Block(NamedTuple):
    """Logits of every row with the first `width` of some columns.

    from_documents   rows are the anchors' positives, not the anchors
    to_documents     columns are positives and negatives, not anchors
    """

    from_documents: bool
    to_documents: bool
    width: int

    @property
    def pairs(self) -> bool:
        """Whether the own pair is among them, and counts; otherwise what belongs to the row itself is left out."""
        return self.from_documents != self.to_documents


def pools(problem: Problem) -> list[list[Block]]:
    anchors = len(problem.anchors if problem.all_anchors is None else problem.all_anchors)
    table = dict(zip(DIRECTIONS, (
        Block(False, True, problem.column_count), Block(True, False, anchors), Block(False, False, anchors),
        Block(True, True, problem.column_count), Block(True, True, len(problem.positives)),
    ), strict=True))  # fmt: skip
    blocks = [table[name] for name in DIRECTIONS if name in problem.directions.split()]
    return [blocks] if problem.joint else [[block] for block in blocks]


def of_one_query(problem: Problem, targets: Tensor, count: int) -> Tensor:
    """(n, k) of some rows' targets, positives: columns below `count` that are documents of the same query, which are
    its positive and, where negatives are a matrix or several of as many rows, every P-th after it."""
    step = max(1, len(problem.positives))
    if problem.column_count % step:
        return targets[:, None]
    return targets[:, None] + torch.arange(0, count, step, device=targets.device)


def lowered(problem: Problem, of_own: Tensor) -> Tensor:
    """From the guide's cosine of the own pair, the cosine above which others are left out."""
    return of_own - (of_own.abs() * problem.margin if problem.relative else problem.margin)
