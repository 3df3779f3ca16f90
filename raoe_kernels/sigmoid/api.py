"""The public sigmoid loss: what a call means, and its argument errors."""

from __future__ import annotations

from torch import Tensor

from .. import _validate
from .._dtypes import as_products, wide
from ..infonce.arguments import check_range, check_rows, ignored, integers, pair_of_ids
from .problem import Problem, sigmoid


def sigmoid_loss(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    scale: float | Tensor = 10.0,
    bias: float | Tensor = -10.0,
    targets: Tensor | None = None,
    ignore: Tensor | tuple[Tensor, Tensor] | None = None,
    positive_ids: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Mean over the anchors of the sum over all columns of -log sigmoid(z (scale cos(anchor, column) + bias)); z is 1
    where the column is a positive of the anchor and -1 elsewhere. Columns are positives + negatives.

    SigLIP (Zhai et al. 2023) Algorithm 1. Every pair of anchor and column is a question of its own, so any number of
    positives is the same loss. Logits come and go by chunks: memory is O((N + P + M) D) and a buffer of 64 MiB (or of
    one row of logits), on `triton` 256 MiB (or 1,024 rows).

    Args:
        anchors, positives, negatives: (N, D), (P, D), (M, D) or None, as in info_nce_loss.
        scale: what similarities are multiplied by, > 0 (the inverse of a temperature). A number, or a () tensor of any
            float dtype, which is given its gradient and whose value is looked at on the CPU only.
        bias: what is added to that, a number or a () float tensor, as scale.
        targets: (N,) integers: which of the P + M columns (positives, then negatives) is the anchor's positive, -1
            where none is; several anchors may share one. Default 0 … N-1, which needs P >= N. Out of range is a
            ValueError on the CPU and a NaN loss on a GPU (and under torch.compile), which is not waited for.
        ignore: columns that are no negatives of an anchor, as in info_nce_loss: (N, P + M) bool, or a pair of ids. An
            anchor's positives always count.
        positive_ids: (anchor_ids (N,), column_ids (P + M,)) integers: columns of the anchor's id are positives, too.
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton".

    Returns:
        () float64 for float64 rows and float32 otherwise, 0 where there are no anchors or no columns. Gradients, NaN,
        autocast and errors are as in info_nce_loss.
    """
    rows, columns = check_rows(anchors, positives, negatives, targets)
    if targets is not None:
        targets = integers("targets", targets, (rows,), anchors)
        check_range(targets, columns, lowest=-1)
    groups = (None, None) if positive_ids is None else pair_of_ids("positive_ids", positive_ids, rows, columns, anchors)
    scale = _scalar(_validate.learnable_scale(scale, anchors.device), anchors)
    bias = _scalar(_validate.number_or_tensor("bias", bias, anchors.device), anchors)
    left_out = ignored(ignore, rows, columns, anchors)
    anchors, positives, negatives = as_products(anchors, positives, negatives)
    return sigmoid(Problem(anchors, positives, negatives, scale, bias, targets, *left_out, *groups), backend)


def _scalar(value: float | Tensor, anchors: Tensor) -> Tensor:
    """() in the dtype of the arithmetic; a number is filled in on the device, which is not waited for."""
    dtype = wide(anchors.dtype)
    return value.to(dtype) if isinstance(value, Tensor) else anchors.new_full((), value, dtype=dtype)
