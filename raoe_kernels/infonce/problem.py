"""Input to the backends of info_nce_loss (see _contract.py), the op's registration, and functions on rows, pools and
blocks that all backends share.

A pool holds the logits of one softmax per anchor, and a block of a pool holds the logits of one direction. The rows of
a block are the anchors or the anchors' positives. The columns of a block are all anchors or all documents (positives
and negatives). A pool's first block contains each row's "own" pair: an anchor and its positive.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._contract import register
from .._dispatch import Op, backends, triton_missing
from .._dtypes import wide

# A row with at most this norm counts as a zero row. torch.nn.functional.cosine_similarity has the same default eps.
EPS = 1e-8

# Directions that contain the positive pair come first, because a pool's first block must contain it.
DIRECTIONS = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc", "positive_to_positive")
SYMMETRIC = "query_to_doc doc_to_query"
HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")

# A column with this id is left out of the negatives of every anchor. The id marks rows without a text.
NO_CANDIDATE = -(2**31)

# Up to this scale, exp(+-scale) and its sums are well within float32's range, so no maximum is subtracted before exp.
UNSHIFTED_SCALE = 40.0


# The names from Problem.special that Triton supports for each form of a call. "several" includes the symmetric loss.
# `scan` and `reference` support all options.
IN_TRITON = {"fused": ("joint directions",), "one direction": ("hardness_mode", "a guide"), "several": ()}


class Problem(NamedTuple):
    """Arguments of one call. The logits have C = P + M columns: the P positives, followed by the M negatives.

    Attributes:
        anchors (N, D), positives (P, D), negatives (M, D) or None: rows of any norm, of the same dtype
        all_anchors: (P, D) or None; row j pairs with positive j
        learned_scale: scalar float tensor, or None; if it is set, `scale` is 1
        targets: (N,) int64, column of each anchor's positive, or None if column i is the positive of anchor i
        ignored: (N, C) bool or None, True for columns to leave out of an anchor's negatives
        anchor_ids (A,), column_ids (C,): both int32 or int64, or None; A is P with all_anchors, else N. A row and a
            column with equal ids are not negatives of each other. For (A, K) and (C, K), see equal_ids
        guide_anchors (A, G), guide_positives (P, G), guide_negatives (M, G): rows of the guide encoder, or None
        directions: names from DIRECTIONS, separated by spaces
        joint: True for one softmax over all directions
        hardness, strength: the call's hardness_mode (or "") and hardness_strength
        margin: the guide's threshold is c - margin, or c - margin |c| if `relative`, where c is the cosine of the own
            pair under the guide
        dims: K increasing prefix widths for K losses, or None for one loss over the full width
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor | None = None
    all_anchors: Tensor | None = None
    learned_scale: Tensor | None = None
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
    dims: tuple[int, ...] | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.anchors, self.positives, self.negatives

    @property
    def column_count(self) -> int:
        return self.positives.shape[0] + (0 if self.negatives is None else self.negatives.shape[0])

    @property
    def symmetric(self) -> bool:
        """Whether the loss is the mean of query_to_doc and doc_to_query, with one softmax per direction."""
        return not self.joint and self.directions == SYMMETRIC

    @property
    def several(self) -> bool:
        """Whether the loss has directions besides query_to_doc."""
        return " " in self.directions

    @property
    def fused(self) -> bool:
        """Whether triton_fused can run the call. The call must have bfloat16 rows, a single softmax and finite
        exp(logit)."""
        fits = self.anchors.dtype == torch.bfloat16 and self.learned_scale is None and self.scale <= UNSHIFTED_SCALE
        fits = fits and not self.symmetric and set(self.special()) <= {"joint directions"}
        return fits and _compiles_fused()

    def special(self) -> list[str]:
        """Return the names of this call's options that go beyond query_to_doc and the symmetric loss."""
        options = {
            "joint directions": self.several and not self.symmetric,
            "all_anchors": self.all_anchors is not None,
            "hardness_mode": self.hardness,
            "a guide": self.guide_anchors is not None,
            "several ids per row": has_several_ids(self),
        }
        return [name for name, is_used in options.items() if is_used]

    def beyond_triton(self) -> str:
        """Return the names of this call's options that only `scan` and `reference` support, or "" if there are none."""
        form = "fused" if self.fused else "several" if self.several else "one direction"
        return ", ".join(option for option in self.special() if option not in IN_TRITON[form])

    @property
    def target_count(self) -> int:
        """Number of columns that `targets` may select: P if an option allows only positives as targets, else C."""
        anchors_with_columns = self.directions in ("query_to_doc", SYMMETRIC)
        positives_only = self.all_anchors is not None or self.hardness or not anchors_with_columns
        return self.positives.shape[0] if positives_only else self.column_count


def _is_empty(problem: Problem) -> bool:
    return len(problem.anchors) == 0


def _losses(problem: Problem) -> Tensor:
    return problem.anchors.new_zeros(len(problem.dims or ()), dtype=wide(problem.anchors.dtype))


OP = Op(
    "infonce",
    ("info_nce_loss",),
    backends(__package__, triton=triton_missing),
    by_case=lambda problem: "scan" if problem.beyond_triton() else "triton",
)
info_nce = register(OP, Problem, gradients=5, is_empty=_is_empty)

# On a GPU, "auto" selects Triton. One Triton pass over the logits of each width is cheaper than the several passes of
# `scan`, although `scan` shares the matrix products between widths.
WIDTHS = Op(
    "info_nce_loss of several widths",
    ("info_nce_loss",),
    backends(f"{__package__}.widths", triton=triton_missing),
    by_case=lambda problem: "scan" if problem.beyond_triton() else "triton",
)
info_nce_widths = register(
    WIDTHS, Problem, gradients=5, result=_losses, saved=(), scale=None, is_empty=_is_empty, name="infonce_widths"
)


@cache
def _compiles_fused() -> bool:
    """Return whether Triton can compile triton_fused. Triton 3.4 and 3.5 reject copies of less than 4 bytes."""
    return tuple(map(int, import_module("triton").__version__.split(".")[:2])) >= (3, 6)


def own_columns(problem: Problem) -> Tensor:
    """Return the column of each anchor's positive, (N,) int64. Targets out of range are clamped to valid columns."""
    if problem.targets is None:
        return torch.arange(len(problem.anchors), device=problem.anchors.device)
    return problem.targets.clamp(0, problem.target_count - 1)


def own_anchors(problem: Problem) -> Tensor:
    """Return the indices (N,) of the anchors in all_anchors or, if all_anchors is None, in `anchors` itself."""
    if problem.all_anchors is None:
        return torch.arange(len(problem.anchors), device=problem.anchors.device)
    return own_columns(problem)


def is_ignored(problem: Any, rows: slice) -> Tensor | None:
    """Return a bool mask (n, C) for a slice of the anchors, True for columns to ignore, or None if the call has no
    `ignore`."""
    if problem.anchor_ids is not None:
        return equal_ids(problem.anchor_ids[rows], problem.column_ids)
    return None if problem.ignored is None else problem.ignored[rows]


def has_several_ids(problem: Any) -> bool:
    """Return whether each row of a problem has several ids, which only `scan` and `reference` support."""
    return problem.anchor_ids is not None and problem.anchor_ids.ndim > 1


def equal_ids(of_rows: Tensor, of_columns: Tensor, back: bool = False) -> Tensor:
    """Return a bool mask (n, C), True where row and column have the same id, or the column's id is NO_CANDIDATE. With
    ids (n, K) and (C, K) instead of (n,) and (C,), id k of a row is compared with id k of a column. With `back`, rows
    are documents and columns are anchors, and a row (not a column) can have the id NO_CANDIDATE, so the mask mirrors
    the mask of query_to_doc."""
    if of_rows.ndim == 1:
        return (of_rows[:, None] == of_columns) | ((of_rows[:, None] if back else of_columns) == NO_CANDIDATE)
    pairs = zip(of_rows.unbind(1), of_columns.unbind(1), strict=True)
    return torch.stack([equal_ids(row, column, back) for row, column in pairs]).any(0)


def units_of(*parts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows of all parts, 1 / norm of each row, and a scalar "poison" (see inverse_norms)."""
    matrices = [x for x in parts if x is not None]
    rows = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
    rows = rows.to(wide(rows.dtype))
    inverse, poison = inverse_norms(rows)
    # Normalise in place if the rows are a copy already.
    is_copy = rows is not matrices[0]
    return rows.mul_(inverse[:, None]) if is_copy else rows * inverse[:, None], inverse, poison


def inverse_norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / |row| for each row (0 for a zero row), and a scalar "poison". The poison is NaN if any row or its norm
    is not finite, otherwise 0."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide(rows.dtype))
    return (1 / norms).masked_fill(norms <= EPS, 0), (norms * 0).sum()


def mean_factor(problem: Problem, poison: Tensor) -> Tensor:
    """Return the factor by which the sum of the rows' losses is multiplied: 1 / N, or 1 / (2 N) if symmetric. The
    factor is NaN if a row, a target or the scale is invalid. An error would be clearer, but raising it would make the
    host wait for the GPU."""
    factor = poison + 1 / (len(problem.anchors) * (2 if problem.symmetric else 1))
    if problem.learned_scale is not None:
        factor = factor.masked_fill(~(problem.learned_scale > 0), torch.nan)
    if problem.targets is None:
        return factor
    outside = ((problem.targets < 0) | (problem.targets >= problem.target_count)).any()
    return factor.masked_fill(outside, torch.nan)


def losses(neg_sum: Tensor, own_exp: Tensor, shift: Tensor, own_logit: Tensor) -> Tensor:
    """Return each row's loss, -log softmax(x)[own], where x are the row's logits and own is its positive's column.
    Here, own_exp is exp(x_own - shift), and neg_sum is the sum of exp(x - shift) over the other columns. The loss is
    computed as log(1 + neg_sum / own_exp), so that a small loss keeps its precision. If this ratio is close to
    overflow, x_own is far below `shift`, and the loss is computed as shift - own_logit + log(neg_sum)."""
    ratio = neg_sum / own_exp
    return torch.where(ratio < 1e30, ratio.log1p(), shift - own_logit + neg_sum.log())


def through_normalisation(grads: Tensor, units: Tensor, inverse: Tensor) -> Tensor:
    """Backpropagate through u = x / |x|: replace each gradient g in `grads` by (g - <g, u> u) / |x|, or 0 if x is 0."""
    along = torch.linalg.vecdot(grads, units)
    return grads.addcmul_(units, along[:, None], value=-1).mul_(inverse[:, None])


def add_rows(sums: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows[i] to sums[places[i]] in a fixed order. On a GPU, index_put is deterministic because it sorts the
    indices, but index_add is not."""
    if sums.is_cuda:
        sums.index_put_((places,), rows, accumulate=True)
    else:
        sums.index_add_(0, places, rows)


def split(
    by_anchors: Tensor | None, by_columns: Tensor | None, positives: int, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Split the columns' gradient, and return the gradients of anchors, positives and negatives."""
    return (
        by_anchors,
        by_columns[:positives] if by_columns is not None and needs[1] else None,
        by_columns[positives:] if by_columns is not None and needs[2] else None,
    )


class Block(NamedTuple):
    """One direction in a pool: the logits of every row with the first `width` columns.

    Attributes:
        from_documents: True if the rows are the anchors' positives, False if the rows are the anchors
        to_documents: True if the columns are positives and negatives, False if the columns are anchors
    """

    from_documents: bool
    to_documents: bool
    width: int

    @property
    def pairs(self) -> bool:
        """Whether the block contains the own pairs. In a block without own pairs, the softmax of each row excludes all
        columns that belong to the same query as the row."""
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
    """Return indices (n, k): row i lists the columns below `count` that contain documents of the same query as column
    targets[i]. These are the target's column and, if the number of negatives is a multiple of P = len(positives), every
    P-th column after it."""
    step = max(1, len(problem.positives))
    if problem.column_count % step:
        return targets[:, None]
    return targets[:, None] + torch.arange(0, count, step, device=targets.device)


def guide_threshold(problem: Problem, own_cosine: Tensor) -> Tensor:
    """Return the guide's threshold: a pair is left out if its cosine under the guide is above this threshold.
    `own_cosine` is the cosine of the own pair (an anchor and its positive) under the guide."""
    return own_cosine - (own_cosine.abs() * problem.margin if problem.relative else problem.margin)
