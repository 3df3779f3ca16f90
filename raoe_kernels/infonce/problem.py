"""What every backend of info_nce_loss is given, and the rules that they share: about rows, and about pools and blocks.

A pool is what one softmax is over. Its blocks are the directions: logits of the row's anchor, or of its positive, with
all anchors, or with positives and negatives. The own pair is in the first block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dtypes import wide

# A row up to this norm counts as zero: torch.nn.functional.cosine_similarity's eps.
EPS = 1e-8

# The own pair's first: a pool begins with a block that has it.
DIRECTIONS = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc", "positive_to_positive")
SYMMETRIC = "query_to_doc doc_to_query"
HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")


class Problem(NamedTuple):
    """One call. C = P + M columns: the positives, then the negatives; A anchors to be found: all_anchors, or anchors.

    anchors         (N, D), positives (P, D), negatives (M, D) or None: rows as given, any norm, one dtype
    all_anchors     (P, D) or None: row j pairs with positive j
    learnt_scale    () float, beside which scale is 1, or None
    targets         (N,) int64: the column that is each anchor's positive; None: anchor i's is column i
    ignored         (N, C) bool or None: columns that are no negatives of an anchor
    anchor_ids      (A,) int64 and column_ids (C,) int64, or None: rows with equal ids are no negatives of each other
    guide_anchors   (A, G), guide_positives (P, G), guide_negatives (M, G): another encoder's rows, or None
    directions      names of DIRECTIONS, with spaces between; joint: one softmax for all, or one each and their mean
    hardness        ST's hardness_mode, "" for none; strength is what cosines are multiplied by before they are added
    margin          by which the guide's cosine of the own pair is lowered; relative: times that cosine's size
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor | None = None
    all_anchors: Tensor | None = None
    learnt_scale: Tensor | None = None
    targets: Tensor | None = None
    ignored: Tensor | None = None
    anchor_ids: Tensor | None = None
    column_ids: Tensor | None = None
    guide_anchors: Tensor | None = None
    guide_positives: Tensor | None = None
    guide_negatives: Tensor | None = None
    scale: float = 20.0
    directions: str = "query_to_doc"
    joint: bool = True
    hardness: str = ""
    strength: float = 0.0
    margin: float = 0.0
    relative: bool = False

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.anchors, self.positives, self.negatives

    @property
    def column_count(self) -> int:
        return len(self.positives) + (0 if self.negatives is None else len(self.negatives))

    @property
    def symmetric(self) -> bool:
        """Both ways between anchors and columns, a softmax each."""
        return not self.joint and self.directions == SYMMETRIC

    def beyond_triton(self) -> str:
        """What this call asks for that the Triton kernels cannot do, "" if there is nothing."""
        wanted = {
            "directions but query_to_doc alone and the symmetric loss": " " in self.directions and not self.symmetric,
            "all_anchors": self.all_anchors is not None,
            "hardness_mode": self.hardness,
            "a guide": self.guide_anchors is not None,
        }
        return ", ".join(name for name, asked in wanted.items() if asked)

    @property
    def target_count(self) -> int:
        """The columns that targets may be: positives alone where a row is looked for among what belongs to them."""
        between = self.directions in ("query_to_doc", SYMMETRIC)
        alone = self.all_anchors is not None or self.hardness or not between
        return len(self.positives) if alone else self.column_count


def own_columns(problem: Problem) -> Tensor:
    """(N,) int64: the column of each anchor's positive, one there is whatever was asked for."""
    if problem.targets is None:
        return torch.arange(len(problem.anchors), device=problem.anchors.device)
    return problem.targets.clamp(0, problem.target_count - 1)


def own_anchors(problem: Problem) -> Tensor:
    """(N,) int64: which of the anchors to be found each anchor is."""
    if problem.all_anchors is None:
        return torch.arange(len(problem.anchors), device=problem.anchors.device)
    return own_columns(problem)


def is_ignored(problem: Any, rows: slice) -> Tensor | None:
    """(n, C), of some anchors: columns that the caller calls no negatives; None where there are none."""
    if problem.anchor_ids is not None:
        return problem.anchor_ids[rows, None] == problem.column_ids
    return None if problem.ignored is None else problem.ignored[rows]


def units_of(*parts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all parts over their norms, in one matrix; 1 / norm of each; and inverse_norms' poison."""
    given = [x for x in parts if x is not None]
    rows = torch.cat(given) if len(given) > 1 else given[0]
    rows = rows.to(wide(rows.dtype))
    inverse, poison = inverse_norms(rows)
    # A copy is made once: in place where there is one already.
    own = rows is not given[0]
    return rows.mul_(inverse[:, None]) if own else rows * inverse[:, None], inverse, poison


def inverse_norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """1 / |row|, 0 for a row that counts as zero, (n,); and () 0, or NaN where a row is not finite or has no finite
    norm."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide(rows.dtype))
    return (1 / norms).masked_fill(norms <= EPS, 0), (norms * 0).sum()


def mean_factor(problem: Problem, poison: Tensor) -> Tensor:
    """() what multiplies the sum of the rows' losses: 1 / N, or 1 / 2N where symmetric; NaN where a row, a target or
    scale is no good. On a GPU none can be looked at without waiting for it, and NaN is better than a wrong number."""
    factor = poison + 1 / (len(problem.anchors) * (2 if problem.symmetric else 1))
    if problem.learnt_scale is not None:
        factor = factor.masked_fill(~(problem.learnt_scale > 0), torch.nan)
    if problem.targets is None:
        return factor
    outside = ((problem.targets < 0) | (problem.targets >= problem.target_count)).any()
    return factor.masked_fill(outside, torch.nan)


def losses(others: Tensor, of_own: Tensor, shift: Tensor, at_own: Tensor) -> Tensor:
    """-log softmax(x)[own] of each row from of_own = exp(x_own - shift) and others, the sum of the other columns'.

    log(1 + others / own) keeps the digits of a small loss; where the quotient is near the end of its range, own is far
    below shift, and log(others) is the loss's smaller part.
    """
    ratio = others / of_own
    return torch.where(ratio < 1e30, ratio.log1p(), shift - at_own + others.log())


def through_normalisation(grads: Tensor, units: Tensor, inverse: Tensor) -> Tensor:
    """du/dx of u = x / |x|, transposed and applied, in place of `grads`: (g - <g, u> u) / |x|; 0 for rows that count
    as zero."""
    along = torch.linalg.vecdot(grads, units)
    return grads.addcmul_(units, along[:, None], value=-1).mul_(inverse[:, None])


def add_rows(sums: Tensor, places: Tensor, rows: Tensor) -> None:
    """sums[places[i]] += rows[i], in the same order of additions every time: on a GPU index_put sorts its indices, and
    index_add leaves the order to chance."""
    if sums.is_cuda:
        sums.index_put_((places,), rows, accumulate=True)
    else:
        sums.index_add_(0, places, rows)


def split(
    by_anchors: Tensor | None, by_columns: Tensor | None, positives: int, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the columns as those of positives and of negatives."""
    return (
        by_anchors,
        by_columns[:positives] if by_columns is not None and needs[1] else None,
        by_columns[positives:] if by_columns is not None and needs[2] else None,
    )


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
