"""Steps in Triton around the matrix products of the in-batch losses: scale the rows before the products, and
backpropagate through the rows' norms after the products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .._contract import Gradients
from .._dtypes import wide
from ..triton_rows import unit_of
from .problem import add_rows
from .triton_passes import UNIT, info_nce_gradients, info_nce_rows

# Launch options of kernels with one program per row. A thread has 8 elements: one 16-byte load in half precision.
ROWS = {"BLOCK": 1024, "num_warps": 4}
INTERPRETED = not hasattr(info_nce_rows, "params")
HALF = 2.0**15  # half of 2^16, the end of float16's range

Rows = tuple[Tensor, Tensor, Tensor | None]


class Units(NamedTuple):
    """Anchors (`rows`) and `columns`, scaled by powers of two and padded with zeros to multiples of UNIT. `inverse`
    holds 1 / norm of each scaled row, first for `columns`, then for `rows`."""

    rows: Tensor
    columns: Tensor
    inverse: Tensor


def units_of(inputs: Rows, pad_rows: bool = False, multiple: int = UNIT.value) -> Units:
    """Scale anchors, positives and negatives, and pad them to a multiple of `multiple` columns. With pad_rows, also pad
    the number of anchors, so that the anchors can serve as columns of the logits."""
    a, p, n = inputs
    column_count = len(p) + (0 if n is None else len(n))
    n = p if n is None else n
    width, unit = triton.cdiv(a.shape[1], multiple) * multiple, unit_of(a, p, n)
    rows = a.new_empty(padded(len(a)) if pad_rows else len(a), width)
    columns = a.new_empty(padded(column_count), width)
    inverse = a.new_empty(len(columns) + len(rows), dtype=wide(a.dtype))
    info_nce_rows[(len(inverse),)](
        a, p, n, rows, columns, inverse, len(a), len(p), column_count, a.shape[1] // unit, width // UNIT.value,
        len(columns), *_strides(unit, a, p, n), half(a.dtype), IN_UNIT=unit, **ROWS,
    )  # fmt: skip
    return Units(rows, columns, inverse)


def half(dtype: torch.dtype) -> float:
    """Return the factor by which float16 rows are scaled, to use more of float16's range, or 1 for other dtypes."""
    return HALF if dtype == torch.float16 else 1.0


def empty_weights(logits: Tensor, units: Units, gradient: bool) -> Tensor:
    """Return the buffer for the weights: the memory of the logits, unless the weights have another dtype."""
    in_place = not gradient or logits.dtype == units.rows.dtype
    return logits if in_place else torch.empty_like(logits, dtype=units.rows.dtype)


def add_to_columns(by_columns: Tensor | None, places: Tensor, rows: Tensor, own_weights: Tensor | None) -> None:
    """Add rows[i] times own_weights[i] to by_columns[places[i]] wherever the index places[i] is in range."""
    if by_columns is not None and own_weights is not None and len(by_columns):
        in_range = (places >= 0) & (places < len(by_columns))
        add_rows(by_columns, places.clamp(0, len(by_columns) - 1), rows * (own_weights * in_range)[:, None])


def through_norms(
    inputs: Rows,
    targets: Tensor | None,
    saved: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    upstream: Tensor,
    needs: tuple[bool, ...],
    dtype: torch.dtype,
    factor: float,
) -> Gradients:
    """Backpropagate through the rows' norms, and return the gradients of anchors, positives and negatives in `dtype`,
    multiplied by `factor` and `upstream`. `saved` holds the first four tensors that triton_kernels.forward saves."""
    by_rows, by_columns, own_weights, loss = saved
    first, second, third = (
        x.new_empty(x.shape, dtype=dtype) if need and x is not None else None
        for x, need in zip(inputs, needs, strict=True)
    )
    grads = [x for x in (first, second, third) if x is not None]
    sums = [x for x in (by_rows, by_columns) if x is not None]
    programs, width = sum(map(len, grads)), inputs[0].shape[1]
    if programs and width:
        a, p, n = (inputs[1] if x is None else x for x in inputs)
        unit = unit_of(a, p, n)
        target_columns = triton.reinterpret(loss, torch.int64) if targets is None else targets.contiguous()
        column_count = len(p) + (0 if inputs[2] is None else len(n))
        with torch.cuda.device_of(a):
            info_nce_gradients[(programs,)](
                a, p, n, sums[0], sums[-1], own_weights, target_columns,
                *(grads[0] if x is None else x for x in (first, second, third)), loss, upstream,
                0 if first is None else len(a), 0 if needs[1] else len(p), len(a), len(p), column_count,
                int(targets is not None), width // unit, sums[0].shape[1] // UNIT.value,
                *_strides(unit, a, p, n), factor, half(a.dtype), IN_UNIT=unit, INTERPRETED=INTERPRETED, **ROWS,
            )  # fmt: skip
    return first, second, third


def integers_or(like: Tensor, *tensors: Tensor | None) -> Iterator[Tensor]:
    """Yield the tensors as int64. For None, yield a placeholder that the kernel never reads."""
    yield from (triton.reinterpret(like, torch.int64) if x is None else x.long().contiguous() for x in tensors)


def padded(count: int) -> int:
    return -(-count // UNIT.value) * UNIT.value


def _strides(unit: int, *matrices: Tensor) -> Iterator[int]:
    for x in matrices:
        yield from (x.stride(0) // unit, x.stride(1))
