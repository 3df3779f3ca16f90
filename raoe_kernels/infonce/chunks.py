"""The matrix products of an in-batch contrast, a chunk of rows at a time, and the place between them for what is made
of the logits. No matrix of all logits exists, and none is made twice.

Of half precision on a GPU tensor cores make the products of unit rows, and nothing is rounded that float32 products
would not: cosines are products of the rows as they were given, over their norms; weights times unit rows are three
products of the halves of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._dtypes import wide
from .problem import units_of

# Bytes of one chunk's logits and weights. Rows are never fewer than ROWS: adding to the columns' gradient reads and
# writes it once a chunk, 8 bytes for each 2 ROWS operations, and an H200 does 165 operations in a byte's time.
BUFFER = 256 << 20
ROWS = 1024
# Since torch 2.10 addmm adds products of bfloat16 to a float32 matrix; only on CUDA devices.
WIDENS = torch.__version__ >= "2.10"  # compared as versions


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


@dataclass(frozen=True, slots=True)
class Halves:
    """A float32 matrix as the sum of two of bfloat16, to 16 binary digits."""

    high: Tensor
    low: Tensor

    def __getitem__(self, place: slice | tuple[slice, slice]) -> Halves:
        return Halves(self.high[place], self.low[place])

    @property
    def T(self) -> Halves:
        return Halves(self.high.T, self.low.T)


@dataclass(frozen=True, slots=True)
class UnitRows:
    """units (n, D), and where halves are multiplied `given`, rows of half precision that `over` (n,) makes units of."""

    units: Tensor
    given: Tensor | None = None
    over: Tensor | None = None

    def __getitem__(self, place: slice | Tensor) -> UnitRows:
        given, over = (None if x is None else x[place] for x in (self.given, self.over))
        return UnitRows(self.units[place], given, over)

    def factor(self) -> Tensor | Halves:
        """What weights are multiplied by."""
        return self.units if self.given is None else halves(self.units)


def unit_rows(*parts: Tensor | None) -> tuple[UnitRows, Tensor, Tensor]:
    """As `problem.units_of`."""
    units, inverse, poison = units_of(*parts)
    rows = [x for x in parts if x is not None]
    if not pays(rows[0]):
        return UnitRows(units), inverse, poison
    over, exponent = torch.frexp(inverse)  # a power of two rounds nothing, and no product overflows
    given = [x.ldexp(e[:, None]).to(x.dtype) for x, e in zip(rows, exponent.split([*map(len, rows)]), strict=True)]
    return UnitRows(units, torch.cat(given), over), inverse, poison


def pays(given: Tensor) -> bool:
    """Seven products of halves take half the time of three of float32, by an H200's datasheet."""
    return given.is_cuda and given.dtype.itemsize == 2 and WIDENS


def cosines(rows: UnitRows, columns: UnitRows, factor: float | Tensor = 1.0, out: Tensor | None = None) -> Tensor:
    """(n, C) factor times the cosines."""
    if rows.given is None or rows.over is None or columns.given is None or columns.over is None:
        return torch.mm(rows.units * factor, columns.units.T, out=out)
    return product(rows.given, columns.given.T, out).mul_(rows.over[:, None] * factor).mul_(columns.over)


def halves(x: Tensor) -> Halves:
    high = x.to(torch.bfloat16)
    return Halves(high, torch.sub(x, high, out=torch.empty_like(high)))


def multiply(x: Tensor | Halves, y: Tensor | Halves, add: Tensor | None = None) -> Tensor:
    """x y, added to `add` where there is one; by halves where x or y is of them."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return product(x, y, add=add)
    x, y = (halves(z) if isinstance(z, Tensor) else z for z in (x, y))
    made = product(x.high, y.high, add=add)
    product(x.high, y.low, add=made)
    return product(x.low, y.high, add=made)
