"""Argument checks for the in-batch losses: shapes of rows, targets, ignored columns, directions and guides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _validate
from .problem import DIRECTIONS


def check_rows(anchors: Tensor, positives: Tensor, negatives: Tensor | None, targets: object) -> tuple[int, int]:
    """Check anchors, positives and negatives. Return (number of anchors, total number of positives and negatives)."""
    _validate.float_tensor("anchors", anchors, 2)
    check_alike("positives", positives, anchors)
    if negatives is not None:
        if isinstance(negatives, Tensor) and not negatives.is_floating_point():
            got = _validate.describe(negatives)
            raise TypeError(f"negatives must be a float tensor, got {got}: pass the indices of positives as targets=")
        if isinstance(negatives, Tensor) and negatives.ndim == 3:
            got = _validate.describe(negatives)
            raise ValueError(f"negatives must have 2 dimensions, got {got}: pass negatives.flatten(0, 1)")
        check_alike("negatives", negatives, anchors)
    if targets is None and positives.shape[0] < anchors.shape[0]:
        raise ValueError(
            f"positives must have at least one row for each of the {anchors.shape[0]} anchors, "
            f"got {_validate.describe(positives)}: add rows to positives, or pass targets"
        )
    return anchors.shape[0], positives.shape[0] + (0 if negatives is None else negatives.shape[0])


def check_alike(name: str, value: Tensor, anchors: Tensor) -> None:
    _validate.float_tensor(name, value, 2)
    if value.shape[1] != anchors.shape[1] or value.dtype != anchors.dtype or value.device != anchors.device:
        raise ValueError(
            f"{name} must have the same number of columns, dtype and device as anchors, "
            f"got {_validate.describe(value)} and {_validate.describe(anchors)}"
        )


def pair_of_ids(
    name: str, value: object, rows: int, columns: int, anchors: Tensor, several: bool = False
) -> tuple[Tensor, Tensor]:
    """Check and return a pair of id tensors: anchor_ids (rows,) and column_ids (columns,). With `several`, the ids may
    also have shapes (rows, K) and (columns, K). If both tensors are int32, they stay int32, because InfoNCE's bfloat16
    kernel has few registers left for ids. Other pairs are cast to int64."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{name} must be a pair of integer tensors (anchor_ids, column_ids), got {_validate.describe(value)}"
        )
    ids = tuple(value[0].shape[1:2]) if several and isinstance(value[0], Tensor) else ()
    anchor_ids = _validate.integers(f"{name}[0] (anchor_ids)", value[0], (rows, *ids), "anchors", anchors)
    column_ids = _validate.integers(f"{name}[1] (column_ids)", value[1], (columns, *ids), "anchors", anchors)
    if anchor_ids.dtype == column_ids.dtype == torch.int32:
        return anchor_ids, column_ids
    return anchor_ids.long(), column_ids.long()


def check_range(targets: Tensor, columns: int, lowest: int = 0, of: str = "positives and negatives") -> None:
    """Check that targets are from `lowest` to columns - 1. `of` is the name of the columns in error messages. Values
    are checked only on a CPU: reading them from a GPU would need a sync, and compiled code cannot branch on them."""
    if targets.numel() == 0:
        return
    if columns == 0 and lowest == 0:
        raise ValueError(f"targets must be indices of rows in {of}, but there are no rows: pass at least one row")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (x.item() for x in targets.aminmax())
        if low < lowest or high >= columns:
            rule = f"targets must be column indices {lowest} … {columns - 1} (one column per row of {of})"
            raise ValueError(f"{rule}, got {low} … {high}")


def check_ignore(
    ignore: object, rows: int, columns: int, anchors: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Check `ignore` and return (mask, None, None), (None, anchor ids, column ids) or (None, None, None)."""
    if ignore is None:
        return None, None, None
    if isinstance(ignore, Tensor):
        if ignore.dtype != torch.bool:
            raise TypeError(f"ignore must be a bool mask or a pair of id tensors, got {_validate.describe(ignore)}")
        return _validate.companion("ignore", ignore, (rows, columns), "anchors", anchors), None, None
    return None, *pair_of_ids("ignore", ignore, rows, columns, anchors, several=True)


def check_directions(directions: object, partition_mode: object, symmetric: object) -> tuple[tuple[str, ...], bool]:
    """Check the directions. Return their names in the order of DIRECTIONS, and whether all of them share one
    softmax."""
    if not isinstance(symmetric, bool):
        raise TypeError(f"symmetric must be True or False, got {_validate.describe(symmetric)}")
    if not isinstance(directions, (tuple, list)):
        raise TypeError(f"directions must be a tuple of names, got {_validate.describe(directions)}")
    for direction in directions:
        _validate.one_of("directions", direction, DIRECTIONS)
    joint = _validate.one_of("partition_mode", partition_mode, ("joint", "per_direction")) == "joint"
    names = tuple(direction for direction in DIRECTIONS if direction in directions)
    if DIRECTIONS[0] not in names or len(names) != len(directions):
        got = _validate.describe(directions)
        raise ValueError(f"directions must include query_to_doc and must not repeat a name, got {got}")
    if names[-2:] == DIRECTIONS[-2:]:
        raise ValueError("directions must not contain both doc_to_doc and positive_to_positive (a part of doc_to_doc)")
    if symmetric and (len(names) > 1 or not joint):
        raise ValueError(
            "symmetric=True sets directions and partition_mode: pass neither, "
            f"got {_validate.describe(directions)} and {partition_mode!r}"
        )
    if symmetric:
        return DIRECTIONS[:2], False
    if not joint and not set(names) <= set(DIRECTIONS[:2]):
        raise ValueError(
            "partition_mode 'per_direction' allows only the directions query_to_doc and doc_to_query, "
            f"got {_validate.describe(directions)}"
        )
    return names, joint


def check_mask(mask: Tensor | None, directions: Sequence[str], all_anchors: Tensor | None) -> None:
    """Raise ValueError if the directions compare pairs that a mask (anchors x columns) does not cover."""
    suffix = " and all_anchors" if all_anchors is not None else ""
    if mask is not None and set(directions) - set(DIRECTIONS[: 1 if suffix else 2]):
        raise ValueError(
            f"with directions {', '.join(directions)}{suffix}, ignore must be a pair of id tensors, not a mask; "
            f"got {_validate.describe(mask)}"
        )


def check_guide(
    guide: object, anchors: int, positives: Tensor, negatives: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Check `guide`, and return its embeddings of anchors, positives and negatives. `anchors` is the number of
    anchors."""
    if guide is None:
        return None, None, None
    counts = {"anchors": anchors, "positives": positives.shape[0]}
    if negatives is not None:
        counts["negatives"] = negatives.shape[0]
    if not isinstance(guide, (tuple, list)) or len(guide) != len(counts):
        got = f"{len(guide)} elements" if isinstance(guide, (tuple, list)) else _validate.describe(guide)
        raise TypeError(f"guide must be a tuple of tensors ({', '.join(counts)}), got {got}")
    for i, (rows, count) in enumerate(zip(guide, counts.values(), strict=True)):
        _validate.float_tensor(f"guide[{i}]", rows, 2)
        _validate.companion(f"guide[{i}]", rows, (count, guide[0].shape[1]), "positives", positives)
        if rows.dtype != guide[0].dtype:
            raise ValueError(f"guide[{i}] must have guide[0]'s dtype {guide[0].dtype}, got {_validate.describe(rows)}")
    first, second, *third = (rows.detach() for rows in guide)
    return first, second, third[0] if third else None
