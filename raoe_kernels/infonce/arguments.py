"""Checks of what an in-batch contrast is given: rows that fit, columns that are meant, columns that are left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _validate
from .problem import DIRECTIONS


def check_rows(anchors: Tensor, positives: Tensor, negatives: Tensor | None, targets: object) -> tuple[int, int]:
    """(rows, columns) of a call."""
    _validate.float_tensor("anchors", anchors, 2)
    like_anchors("positives", positives, anchors)
    if negatives is not None:
        like_anchors("negatives", negatives, anchors)
    if targets is None and len(positives) < len(anchors):
        raise ValueError(
            f"positives must have a row for each of the {len(anchors)} anchors where no targets are given, "
            f"got {_validate.describe(positives)}"
        )
    return len(anchors), len(positives) + (0 if negatives is None else len(negatives))


def like_anchors(name: str, value: Tensor, anchors: Tensor) -> None:
    _validate.float_tensor(name, value, 2)
    if value.shape[1] != anchors.shape[1] or value.dtype != anchors.dtype or value.device != anchors.device:
        raise ValueError(
            f"{name} must have anchors' columns, dtype and device, "
            f"got {_validate.describe(value)} and {_validate.describe(anchors)}"
        )


def integers(name: str, value: object, shape: tuple[int, ...], anchors: Tensor) -> Tensor:
    """An int64 tensor of that shape on anchors' device."""
    return _validate.integers(name, value, shape, "anchors", anchors).to(torch.int64)


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


def check_range(targets: Tensor, columns: int, lowest: int = 0, of: str = "positives and negatives") -> None:
    """On the CPU only: elsewhere a look would wait for the device, and a compiled graph cannot branch on it.

    `lowest` is -1 where an anchor may have no positive. The columns are those `of` something.
    """
    if targets.numel() == 0:
        return
    if columns == 0 and lowest == 0:
        raise ValueError(f"targets must be columns of {of}, of which there are none")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (x.item() for x in targets.aminmax())
        if low < lowest or high >= columns:
            raise ValueError(f"targets must be columns {lowest} … {columns - 1} of {of}, got {low} … {high}")


def ignored(
    ignore: object, rows: int, columns: int, anchors: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(mask, anchor ids, column ids), of which one kind or none is there."""
    if ignore is None:
        return None, None, None
    if isinstance(ignore, Tensor):
        if ignore.dtype != torch.bool:
            raise TypeError(f"ignore must be bool, or a pair of id tensors, got {_validate.describe(ignore)}")
        return _validate.companion("ignore", ignore, (rows, columns), "anchors", anchors), None, None
    return None, *pair_of_ids("ignore", ignore, rows, columns, anchors)


def directed(directions: object, partition_mode: object, symmetric: object) -> tuple[tuple[str, ...], bool]:
    """(directions, whether one softmax is over all of them); symmetric is short for two that have one each."""
    if not isinstance(symmetric, bool):
        raise TypeError(f"symmetric must be True or False, got {_validate.describe(symmetric)}")
    if not isinstance(directions, (tuple, list)):
        raise TypeError(f"directions must be a tuple of names, got {_validate.describe(directions)}")
    for name in directions:
        _validate.one_of("directions", name, DIRECTIONS)
    joint = _validate.one_of("partition_mode", partition_mode, ("joint", "per_direction")) == "joint"
    found = tuple(name for name in DIRECTIONS if name in directions)
    if DIRECTIONS[0] not in found or len(found) != len(directions):
        raise ValueError(f"directions must be query_to_doc and others, each once, got {_validate.describe(directions)}")
    if found[-2:] == DIRECTIONS[-2:]:
        raise ValueError("directions must be doc_to_doc or positive_to_positive, which is a part of it, got both")
    if symmetric and (len(found) > 1 or not joint):
        raise ValueError(
            "symmetric is short for directions and partition_mode, which must not be given too, "
            f"got {_validate.describe(directions)} and {partition_mode!r}"
        )
    if symmetric:
        return DIRECTIONS[:2], False
    if not joint and not set(found) <= set(DIRECTIONS[:2]):
        raise ValueError(
            "partition_mode 'per_direction' must have directions query_to_doc and doc_to_query alone, which have a "
            f"positive to find, got {_validate.describe(directions)}"
        )
    return found, joint


def check_mask(mask: Tensor | None, directions: Sequence[str], all_anchors: Tensor | None) -> None:
    """A mask is of anchors and columns, and says nothing of two anchors, of two columns or of other anchors."""
    others = " of all_anchors" if all_anchors is not None else ""
    if mask is not None and set(directions) - set(DIRECTIONS[: 1 if others else 2]):
        raise ValueError(
            f"ignore must be a pair of id tensors with directions {', '.join(directions)}{others}, "
            f"got {_validate.describe(mask)}"
        )


def guiding(
    guide: object, anchors: int, positives: Tensor, negatives: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The guide's rows of anchors, of which there are so many, positives and negatives."""
    if guide is None:
        return None, None, None
    counts = {"anchors": anchors, "positives": len(positives)}
    if negatives is not None:
        counts["negatives"] = len(negatives)
    if not isinstance(guide, (tuple, list)) or len(guide) != len(counts):
        got = f"{len(guide)} of them" if isinstance(guide, (tuple, list)) else _validate.describe(guide)
        raise TypeError(f"guide must be a tuple of tensors ({', '.join(counts)}), got {got}")
    for i, (rows, count) in enumerate(zip(guide, counts.values(), strict=True)):
        _validate.float_tensor(f"guide[{i}]", rows, 2)
        _validate.companion(f"guide[{i}]", rows, (count, guide[0].shape[1]), "positives", positives)
        if rows.dtype != guide[0].dtype:
            raise ValueError(f"guide[{i}] must have guide[0]'s dtype {guide[0].dtype}, got {_validate.describe(rows)}")
    first, second, *third = (rows.detach() for rows in guide)
    return first, second, third[0] if third else None
