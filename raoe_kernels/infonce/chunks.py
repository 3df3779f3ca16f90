"""The matrix products of an in-batch contrast, a chunk of rows at a time, and the place between them for what is made
of the logits. No matrix of all logits exists, and none is made twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._dtypes import wide

# Bytes of one chunk's logits and weights. Rows are never fewer than ROWS: adding to the columns' gradient reads and
# writes it once a chunk, 8 bytes for each 2 ROWS operations, and an H200 does 165 operations in a byte's time.
BUFFER = 256 << 20
ROWS = 1024
# Since torch 2.10 addmm adds products of bfloat16 to a float32 matrix; only on CUDA devices.
WIDENS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def product(x: Tensor, y: Tensor, out: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """x y, in `out` where there is one, or added to `add`. Of float16 and bfloat16 it is float32, made by tensor cores
    on a GPU; otherwise it has the dtype of the two."""
    if x.dtype.itemsize == 2:
        if x.is_cuda and WIDENS:
            if add is not None:
                return torch.addmm(add, x, y, out_dtype=torch.float32, out=add)
            return torch.mm(x, y, out_dtype=torch.float32, out=out)
        x, y = x.float(), y.float()
    return torch.mm(x, y, out=out) if add is None else torch.addmm(add, x, y, out=add)


def sweep(
    rows: Tensor,
    columns: Tensor,
    weigh: Callable[[int, Tensor], Tensor | None],
    by_rows: bool = False,
    wanted: slice | None = None,
    most: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """weights columns, where `by_rows`, and weights[:, wanted]^T rows, where there is a `wanted`: both in `product`'s
    dtype, and None otherwise.

    weigh(first, logits) is handed rows[first : first + n] columns^T, which it may write to, and gives the (n, columns)
    weights in the rows' dtype, or None where neither product is asked for. A chunk has at most `most` rows, by default
    as many as BUFFER and ROWS say.
    """
    gradient = by_rows or wanted is not None
    cell = wide(rows.dtype).itemsize + (rows.dtype.itemsize if gradient and rows.dtype.itemsize == 2 else 0)
    step = even(len(rows), most or max(ROWS, BUFFER // (cell * max(1, len(columns)))))
    whole = step >= len(rows)
    grads = None if whole or not by_rows else rows.new_empty(rows.shape, dtype=wide(rows.dtype))
    sums = None
    for first in range(0, len(rows), step):
        here = rows if whole else rows[first : first + step]
        weights = weigh(first, product(here, columns.t()))
        if weights is None:
            continue
        if by_rows:
            made = product(weights, columns, None if grads is None else grads[first : first + step])
            grads = made if grads is None else grads
        if wanted is not None:
            chosen = weights if wanted == slice(0, None) else weights[:, wanted]
            sums = product(chosen.t(), here, add=sums)
            del chosen
        del weights  # the next chunk's take their place
    return grads, sums


def even(count: int, most: int) -> int:
    """The size of as few equal chunks of at most `most` as hold `count`; the last may be smaller."""
    chunks = -(-count // most)
    return -(-count // max(1, chunks))
