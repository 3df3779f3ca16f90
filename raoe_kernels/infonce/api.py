"""The public InfoNCE loss: what a call means, and its argument errors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate
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
    _like_anchors("positives", positives, anchors)
    if negatives is not None:
        _like_anchors("negatives", negatives, anchors)
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
        targets = _integers("targets", targets, (rows,), anchors)
        _check_range(targets, columns)
    mask, anchor_ids, column_ids = _ignore(ignore, rows, columns, anchors)
    problem = Problem(
        anchors, positives, negatives, targets, mask, anchor_ids, column_ids, tau, symmetric
    )  # fmt: skip
    return info_nce(problem, backend)


def _like_anchors(name: str, value: Tensor, anchors: Tensor) -> None:
    _validate.float_tensor(name, value, 2)
    if value.shape[1] != anchors.shape[1] or value.dtype != anchors.dtype or value.device != anchors.device:
        raise ValueError(
            f"{name} must have anchors' columns, dtype and device, "
            f"got {_validate.describe(value)} and {_validate.describe(anchors)}"
        )


def _integers(name: str, value: object, shape: tuple[int, ...], anchors: Tensor) -> Tensor:
    """An int64 tensor of that shape on anchors' device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {_validate.describe(value)}")
    if value.dtype == torch.bool:
        raise TypeError(f"{name} must be integers (up to int64), got {_validate.describe(value)}")
    _validate.integer_tensor(name, value)
    if tuple(value.shape) != shape or value.device != anchors.device:
        raise ValueError(
            f"{name} must have shape {shape} and be on anchors' device {anchors.device}, "
            f"got {_validate.describe(value)}"
        )
    return value.to(torch.int64)


def _check_range(targets: Tensor, columns: int) -> None:
    """On the CPU only: elsewhere a look would wait for the device, and a compiled graph cannot branch on it."""
    if targets.numel() == 0:
        return
    if columns == 0:
        raise ValueError("targets must be columns of positives and negatives, of which there are none")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (x.item() for x in targets.aminmax())
        if low < 0 or high >= columns:
            raise ValueError(
                f"targets must be columns 0 … {columns - 1} of positives and negatives, got {low} … {high}"
            )


def _ignore(
    ignore: object, rows: int, columns: int, anchors: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(mask, anchor ids, column ids), of which one kind or none is there."""
    if ignore is None:
        return None, None, None
    if isinstance(ignore, Tensor):
        if ignore.dtype != torch.bool:
            raise TypeError(f"ignore must be bool, or a pair of id tensors, got {_validate.describe(ignore)}")
        if tuple(ignore.shape) != (rows, columns) or ignore.device != anchors.device:
            raise ValueError(
                f"ignore must have shape {(rows, columns)} and be on anchors' device {anchors.device}, "
                f"got {_validate.describe(ignore)}"
            )
        return ignore, None, None
    if not isinstance(ignore, (tuple, list)) or len(ignore) != 2:
        raise TypeError(
            "ignore must be a bool tensor or a pair of integer tensors (anchor_ids, column_ids), "
            f"got {_validate.describe(ignore)}"
        )
    return (
        None,
        _integers("ignore[0] (anchor_ids)", ignore[0], (rows,), anchors),
        _integers("ignore[1] (column_ids)", ignore[1], (columns,), anchors),
    )
