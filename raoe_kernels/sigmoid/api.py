"""The public sigmoid loss: what a call means, and its argument errors."""

from __future__ import annotations

from torch import Tensor

from .. import _validate
from .._dtypes import wide
from ..infonce.arguments import check_range, ignored, integers, like_anchors, pair_of_ids
from .autograd import sigmoid
from .problem import Problem


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
        anchors: (N, D) float16, bfloat16, float32 or float64. Rows are normalised here, and the gradient goes through
            it. A row of norm <= 1e-8 has similarity 0 to everything and gradient 0.
        positives: (P, D), of anchors' dtype and device.
        negatives: (M, D), or None. M need not be a multiple of N.
        scale: what similarities are multiplied by, > 0 (the inverse of a temperature). A number, or a () tensor of any
            float dtype, which is given its gradient and whose value is looked at on the CPU only.
        bias: what is added to that, a number or a () float tensor, as scale.
        targets: (N,) integers: which of the P + M columns (positives, then negatives) is the anchor's positive, -1
            where none is; several anchors may share one. Default 0 … N-1, which needs P >= N. Out of range is a
            ValueError on the CPU and a NaN loss on a GPU (and under torch.compile), which is not waited for.
        ignore: columns that are no negatives of an anchor (false negatives): (N, P + M) bool, True where the column is
            left out; or a pair of integer tensors (anchor_ids (N,), column_ids (P + M,)): left out where the ids are
            equal. An anchor's positives always count, whatever `ignore` says of them.
        positive_ids: (anchor_ids (N,), column_ids (P + M,)) integers: columns of the anchor's id are positives, too.
        backend: "auto", "reference", "scan" (plain torch, a chunk of rows at a time) or "triton".

    Returns:
        () float64 for float64 rows and float32 otherwise, 0 where there are no anchors or no columns. Gradients have
        the dtype of what they are of. NaN, and NaN gradients, where any row holds a NaN or an infinity (an ignored one
        too) or has no finite norm.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: `backend` was named and cannot run here; or a second derivative was asked for, which there
            is none of.
    """
    _validate.float_tensor("anchors", anchors, 2)
    like_anchors("positives", positives, anchors)
    if negatives is not None:
        like_anchors("negatives", negatives, anchors)
    rows, columns = len(anchors), len(positives) + (0 if negatives is None else len(negatives))
    if targets is None:
        if len(positives) < rows:
            raise ValueError(
                f"positives must have a row for each of the {rows} anchors where no targets are given, "
                f"got {_validate.describe(positives)}"
            )
    else:
        targets = integers("targets", targets, (rows,), anchors)
        check_range(targets, columns, lowest=-1)
    groups = (None, None) if positive_ids is None else pair_of_ids("positive_ids", positive_ids, rows, columns, anchors)
    problem = Problem(
        anchors,
        positives,
        negatives,
        _scalar(_validate.learnable_scale(scale, anchors.device), anchors),
        _scalar(_validate.number_or_tensor("bias", bias, anchors.device), anchors),
        targets,
        *ignored(ignore, rows, columns, anchors),
        *groups,
    )
    return sigmoid(problem, backend)


def _scalar(value: float | Tensor, anchors: Tensor) -> Tensor:
    """() in the dtype of the arithmetic; a number is filled in on the device, which is not waited for."""
    dtype = wide(anchors.dtype)
    return value.to(dtype) if isinstance(value, Tensor) else anchors.new_full((), value, dtype=dtype)
