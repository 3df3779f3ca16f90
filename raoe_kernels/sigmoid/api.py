"""Public sigmoid loss: documentation and argument checks."""

from __future__ import annotations

from torch import Tensor

from .. import _validate
from .._dtypes import as_products, wide
from ..infonce.arguments import check_ignore, check_range, check_rows, pair_of_ids
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
    """Sigmoid loss over all pairs of an anchor and a positive or negative (SigLIP, Zhai et al. 2023, Algorithm 1).

    The logits have a column for each positive, followed by a column for each negative. The loss of an anchor is the sum
    over all columns of -log sigmoid(z (scale cos(anchor, column) + bias)), where z is 1 if the column is a positive of
    the anchor, else -1. The result is the mean over the anchors. An anchor may have any number of positives. Logits are
    computed in chunks of rows, so the loss needs O((N + P + M) D) memory and one buffer. The buffer takes 64 MiB or the
    size of one row of logits, whichever is larger. With "triton", the buffer takes 256 MiB or the size of 1,024 rows,
    whichever is larger.

    Args:
        anchors, positives, negatives: (N, D), (P, D), (M, D) or None, as in info_nce_loss.
        scale: number > 0 that multiplies the similarities (the inverse of a temperature), or a scalar float tensor,
            which gets a gradient. A tensor's value is checked only on a CPU.
        bias: number that is added to the scaled similarities, or a scalar float tensor, which gets a gradient.
        targets: (N,) integers: for each anchor, the index of the column that is its positive, or -1 if it has none.
            Anchors may share a target. The default is 0 … N-1, which requires P >= N. A target out of range raises
            ValueError on a CPU. On a GPU and under torch.compile, it makes the loss NaN, because checking the
            targets would make the host wait for the device.
        ignore: columns to leave out of an anchor's negatives, as in info_nce_loss: (N, P + M) bool, or a pair of id
            tensors. An anchor's positives are never left out.
        positive_ids: pair of integer tensors (anchor_ids (N,), column_ids (P + M,)). Every column whose id equals
            an anchor's id is also a positive of this anchor.
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton".

    Returns:
        Scalar loss, float64 for float64 rows, else float32. It is 0 if there are no anchors or no columns. Gradients,
        NaN inputs, autocast and errors are handled as in info_nce_loss.
    """
    rows, columns = check_rows(anchors, positives, negatives, targets)
    if targets is not None:
        targets = _validate.integers("targets", targets, (rows,), "anchors", anchors).long()
        check_range(targets, columns, lowest=-1)
    groups = (None, None) if positive_ids is None else pair_of_ids("positive_ids", positive_ids, rows, columns, anchors)
    scale = _scalar(_validate.learnable_scale(scale, anchors.device), anchors)
    bias = _scalar(_validate.number_or_tensor("bias", bias, anchors.device), anchors)
    ignore_masks = check_ignore(ignore, rows, columns, anchors)
    anchors, positives, negatives = as_products(anchors, positives, negatives)
    return sigmoid(Problem(anchors, positives, negatives, scale, bias, targets, *ignore_masks, *groups), backend)


def _scalar(value: float | Tensor, anchors: Tensor) -> Tensor:
    """Return `value` as a scalar tensor: float64 for float64 anchors, else float32. new_full does not make the host
    wait."""
    dtype = wide(anchors.dtype)
    if value.__class__ is float:  # not symbolic: torch.compile would compile new_full anew for every value
        return anchors.new_full((), value, dtype=dtype)
    return value.to(dtype) if isinstance(value, Tensor) else anchors.new_ones((), dtype=dtype) * value
