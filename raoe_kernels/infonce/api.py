"""The public InfoNCE loss: what a call means, and its argument errors."""

from __future__ import annotations

from torch import Tensor

from .. import _validate
from .arguments import check_range, ignored, integers, like_anchors
from .autograd import info_nce
from .problem import Problem


def info_nce_loss(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    tau: float = 20.0,
    targets: Tensor | None = None,
    ignore: Tensor | tuple[Tensor, Tensor] | None = None,
    symmetric: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Mean over the anchors of -log softmax(tau cos(anchor, column))[its positive]; columns are positives + negatives.

    BeLLM (Li & Li 2024) Eq. 6, SimCSE (Gao et al. 2021) Eq. 1 and 5, sentence-transformers'
    MultipleNegativesRankingLoss with cos_sim. Logits come and go by chunks: memory is O((N + P + M) D) and a buffer
    of 64 MiB (or of one row of logits), on `triton` 256 MiB (or 1,024 rows).

    Args:
        anchors: (N, D) float16, bfloat16, float32 or float64. Rows are normalised here, and the gradient goes through
            it. A row of norm <= 1e-8 has similarity 0 to everything and gradient 0.
        positives: (P, D), of anchors' dtype and device.
        negatives: (M, D), or None. M need not be a multiple of N.
        tau: what similarities are multiplied by, > 0 (the inverse of a temperature).
        targets: (N,) integers: which of the P + M columns (positives, then negatives) is the anchor's positive, for a
            gathered batch for example; several anchors may share one. Default 0 … N-1, which needs P >= N. Out of
            range is a ValueError on the CPU and a NaN loss on a GPU (and under torch.compile), which is not waited for.
        ignore: columns that are no negatives of an anchor (false negatives): (N, P + M) bool, True where the column is
            left out; or a pair of integer tensors (anchor_ids (N,), column_ids (P + M,)): left out where the ids are
            equal. An anchor's own positive always counts, whatever `ignore` says of it.
        symmetric: the mean of this loss and of the other direction, sentence-transformers'
            directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction": the positive of anchor i, among
            all N anchors, is to find anchor i. Anchor j is left out there where `ignore` says that column targets[i] is
            no negative of anchor j (j != i).
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton".

    Returns:
        () float64 for float64 rows and float32 otherwise, 0 where N = 0. Gradients have the rows' dtype. NaN, and NaN
        gradients, where any row holds a NaN or an infinity (an ignored one too) or has no finite norm.

    Raises:
        TypeError, ValueError: naming the argument. RuntimeError: `backend` was named and cannot run here; or a second
        derivative was asked for, which there is none of.
    """
    _validate.float_tensor("anchors", anchors, 2)
    like_anchors("positives", positives, anchors)
    if negatives is not None:
        like_anchors("negatives", negatives, anchors)
    tau = _validate.number("tau", tau, low=0, strict=True)
    if not isinstance(symmetric, bool):
        raise TypeError(f"symmetric must be True or False, got {_validate.describe(symmetric)}")
    rows, columns = len(anchors), len(positives) + (0 if negatives is None else len(negatives))
    if targets is None:
        if len(positives) < rows:
            raise ValueError(
                f"positives must have a row for each of the {rows} anchors where no targets are given, "
                f"got {_validate.describe(positives)}"
            )
    else:
        targets = integers("targets", targets, (rows,), anchors)
        check_range(targets, columns)
    mask, anchor_ids, column_ids = ignored(ignore, rows, columns, anchors)
    problem = Problem(
        anchors, positives, negatives, targets, mask, anchor_ids, column_ids, tau, symmetric
    )  # fmt: skip
    return info_nce(problem, backend)
