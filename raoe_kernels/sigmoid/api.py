"""Public sigmoid loss: documentation and argument checks."""

from __future__ import annotations

from torch import Tensor

from .. import _validate
from .._dtypes import as_products, wide
from ..infonce.arguments import check_ignore, check_range, check_rows, integers, pair_of_ids
from .problem import Problem, sigmoid


@_validate.public
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
    """Sigmoid loss over all pairs of an anchor and a column (SigLIP, Zhai et al. 2023, Algorithm 1).

    The columns are the positives, then the negatives. The loss is the mean over anchors of the sum over columns of
    -log sigmoid(z (scale cos(anchor, column) + bias)), with z = 1 if the column is a positive of the anchor, else -1.
    An anchor may have any number of positives. Logits are computed in chunks: memory is O((N + P + M) D) plus a buffer
    of 64 MiB (at least one row of logits), or 256 MiB (at least 1,024 rows) for "triton".

    Args:
        anchors, positives, negatives: (N, D), (P, D), (M, D) or None, as in info_nce_loss.
        scale: factor for the similarities, > 0 (the inverse of a temperature): a number, or a () tensor of any float
            dtype, which gets a gradient. A tensor's value is checked on the CPU only.
        bias: number or () float tensor added to the scaled similarity.
        targets: (N,) integers: the column that is the anchor's positive, or -1 for none. Anchors may share a column.
            Default 0 … N-1, which needs P >= N. A value out of range raises ValueError on the CPU; on a GPU and under
            torch.compile it makes the loss NaN, because a check would have to wait for the device.
        ignore: columns that are not negatives of an anchor, as in info_nce_loss: (N, P + M) bool, or a pair of ids. An
            anchor's positives always count.
        positive_ids: (anchor_ids (N,), column_ids (P + M,)) integers: columns with the anchor's id are also positives.
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton".

    Returns:
        () loss, float64 for float64 rows, otherwise float32; 0 if there are no anchors or no columns. Gradients, NaN,
        autocast and errors are as in info_nce_loss.
    """
    rows, columns = check_rows(anchors, positives, negatives, targets)
    if targets is not None:
        targets = integers("targets", targets, (rows,), anchors)
        check_range(targets, columns, lowest=-1)
    groups = (None, None) if positive_ids is None else pair_of_ids("positive_ids", positive_ids, rows, columns, anchors)
    scale = _scalar(_validate.learnable_scale(scale, anchors.device), anchors)
    bias = _scalar(_validate.number_or_tensor("bias", bias, anchors.device), anchors)
    ignore_masks = check_ignore(ignore, rows, columns, anchors)
    anchors, positives, negatives = as_products(anchors, positives, negatives)
    return sigmoid(Problem(anchors, positives, negatives, scale, bias, targets, *ignore_masks, *groups), backend)


def _scalar(value: float | Tensor, anchors: Tensor) -> Tensor:
    """Return a () tensor in the dtype of the arithmetic. new_full writes a number on the device, without a sync."""
    dtype = wide(anchors.dtype)
    return value.to(dtype) if isinstance(value, Tensor) else anchors.new_full((), value, dtype=dtype)
