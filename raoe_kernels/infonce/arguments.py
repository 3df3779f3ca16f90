"""Checks of what an in-batch contrast is given: rows that fit, columns that are meant, columns that are left out."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validate


def like_anchors(name: str, value: Tensor, anchors: Tensor) -> None:
    _validate.float_tensor(name, value, 2)
    if value.shape[1] != anchors.shape[1] or value.dtype != anchors.dtype or value.device != anchors.device:
        raise ValueError(
            f"{name} must have anchors' columns, dtype and device, "
            f"got {_validate.describe(value)} and {_validate.describe(anchors)}"
        )


def integers(name: str, value: object, shape: tuple[int, ...], anchors: Tensor) -> Tensor:
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


def pair_of_ids(name: str, value: object, rows: int, columns: int, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """(anchor_ids (rows,), column_ids (columns,)) from two integer tensors."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{name} must be a pair of integer tensors (anchor_ids, column_ids), got {_validate.describe(value)}"
        )
    return (
        integers(f"{name}[0] (anchor_ids)", value[0], (rows,), anchors),
        integers(f"{name}[1] (column_ids)", value[1], (columns,), anchors),
    )


def check_range(targets: Tensor, columns: int, lowest: int = 0) -> None:
    """On the CPU only: elsewhere a look would wait for the device, and a compiled graph cannot branch on it.

    `lowest` is -1 where an anchor may have no positive.
    """
    if targets.numel() == 0:
        return
    if columns == 0 and lowest == 0:
        raise ValueError("targets must be columns of positives and negatives, of which there are none")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (x.item() for x in targets.aminmax())
        if low < lowest or high >= columns:
            raise ValueError(
                f"targets must be columns {lowest} … {columns - 1} of positives and negatives, got {low} … {high}"
            )


def ignored(
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
    return None, *pair_of_ids("ignore", ignore, rows, columns, anchors)
