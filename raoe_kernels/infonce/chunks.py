"""Matrix products for the in-batch losses, computed one chunk of rows at a time. A callback turns a chunk's logits into
weights (derivatives of the loss). The whole matrix of logits is never stored, and no logit is computed twice.

For half precision on a GPU, tensor cores compute the products, with rounding errors no larger than in float32. Cosines
are products of input rows, divided by the rows' norms. A product of weights and unit rows is computed as the sum of
three products of bfloat16 matrices (see Halves).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._dtypes import wide
from .problem import units_of

# Bytes of one chunk's logits and weights. A chunk has at least ROWS rows: for each element of the columns' gradient, a
# chunk moves 8 bytes and does 2 ROWS operations. An H200 does 165 operations in the time that it takes to move one
# byte.
BUFFER = 256 << 20
ROWS = 1024
# Whether products of half-precision matrices can have float32 results: since torch 2.10, on CUDA devices only.
WIDENS = torch.__version__ >= "2.10"  # torch compares this string as a version


def product(x: Tensor, y: Tensor, out: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """Return x @ y. If `out` is given, write the product to it; if `add` is given, add the product to it. For float16
    and bfloat16 inputs, the result is float32, computed by tensor cores on a GPU. Otherwise the result has the dtype of
    the inputs."""
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
    part: slice | None = None,
    most: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return two products: weights @ columns if by_rows is set, and weights[:, part]^T @ rows if `part` is set. A
    product that is not requested is None. The products have the dtype that the function `product` returns.

    The callback weigh(first, logits) gets logits = rows[first : first + n] @ columns^T and may overwrite them. The
    callback returns the (n, columns) weights in the dtype of the rows, or None if no product is needed. A chunk has at
    most `most` rows, by default as many as BUFFER and ROWS allow.
    """
    gradient = by_rows or part is not None
    cell = wide(rows.dtype).itemsize + (rows.dtype.itemsize if gradient and rows.dtype.itemsize == 2 else 0)
    step = even(len(rows), most or max(ROWS, BUFFER // (cell * max(1, len(columns)))))
    whole = step >= len(rows)
    grads = None if whole or not by_rows else rows.new_empty(rows.shape, dtype=wide(rows.dtype))
    sums = None
    for first in range(0, len(rows), step):
        chunk = rows if whole else rows[first : first + step]
        weights = weigh(first, product(chunk, columns.t()))
        if weights is None:
            continue
        if by_rows:
            chunk_grads = product(weights, columns, None if grads is None else grads[first : first + step])
            grads = chunk_grads if grads is None else grads
        if part is not None:
            part_weights = weights if part == slice(0, None) else weights[:, part]
            sums = product(part_weights.t(), chunk, add=sums)
            del part_weights
        del weights  # so that the next chunk's weights can reuse the memory
    return grads, sums


def even(count: int, most: int) -> int:
    """Return the smallest chunk size that splits `count` rows into no more chunks than the size `most` would."""
    chunks = -(-count // most)
    return -(-count // max(1, chunks))


@dataclass(frozen=True, slots=True)
class Halves:
    """A float32 matrix, rounded to 16 binary digits and stored as the sum of two bfloat16 matrices."""

    high: Tensor
    low: Tensor

    def __getitem__(self, place: slice | tuple[slice, slice]) -> Halves:
        return Halves(self.high[place], self.low[place])

    @property
    def T(self) -> Halves:
        return Halves(self.high.T, self.low.T)


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Unit rows (n, D). For half precision on a GPU, `half_rows` holds the input rows scaled by powers of two, and
    `inverse` holds 1 / norm of each of these scaled rows."""

    units: Tensor
    half_rows: Tensor | None = None
    inverse: Tensor | None = None

    def __getitem__(self, place: slice | Tensor) -> UnitRows:
        half_rows, inverse = (None if x is None else x[place] for x in (self.half_rows, self.inverse))
        return UnitRows(self.units[place], half_rows, inverse)

    def factor(self) -> Tensor | Halves:
        """Return the unit rows in the form that is multiplied by weights: as Halves if that is faster."""
        return self.units if self.half_rows is None else halves(self.units)


def unit_rows(*parts: Tensor | None) -> tuple[UnitRows, Tensor, Tensor]:
    """Normalise rows as `problem.units_of` does, but return them as UnitRows."""
    units, inverse, poison = units_of(*parts)
    rows = [x for x in parts if x is not None]
    if not pays(rows[0]):
        return UnitRows(units), inverse, poison
    mantissa, exponent = torch.frexp(inverse)  # scaling by a power of two is exact, and products cannot overflow
    half_rows = [x.ldexp(e[:, None]).to(x.dtype) for x, e in zip(rows, exponent.split([*map(len, rows)]), strict=True)]
    return UnitRows(units, torch.cat(half_rows), mantissa), inverse, poison


def pays(rows: Tensor) -> bool:
    """Return whether Halves save time for these rows. On a GPU, the 7 bfloat16 products that replace 3 float32 products
    take half as long (H200 datasheet)."""
    return rows.is_cuda and rows.dtype.itemsize == 2 and WIDENS


def cosines(rows: UnitRows, columns: UnitRows, factor: float | Tensor = 1.0, out: Tensor | None = None) -> Tensor:
    """Return the cosines (n, C) of rows and columns, multiplied by `factor`."""
    if rows.half_rows is None or rows.inverse is None or columns.half_rows is None or columns.inverse is None:
        return torch.mm(rows.units * factor, columns.units.T, out=out)
    return product(rows.half_rows, columns.half_rows.T, out).mul_(rows.inverse[:, None] * factor).mul_(columns.inverse)


def halves(x: Tensor) -> Halves:
    high = x.to(torch.bfloat16)
    return Halves(high, torch.sub(x, high, out=torch.empty_like(high)))


def multiply(x: Tensor | Halves, y: Tensor | Halves, add: Tensor | None = None) -> Tensor:
    """Return x @ y (plus `add`, if given). If x or y is a Halves, also split the other matrix, and return high @ high +
    high @ low + low @ high (plus `add`)."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return product(x, y, add=add)
    x, y = (halves(z) if isinstance(z, Tensor) else z for z in (x, y))
    result = product(x.high, y.high, add=add)
    product(x.high, y.low, add=result)
    return product(x.low, y.high, add=result)
