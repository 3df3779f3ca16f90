"""Unit rows, and matrix products of them. Of half precision on a GPU tensor cores make those, and nothing is rounded
that float32 products would not: cosines are products of the rows as they were given, over their norms; weights times
unit rows are three products of the halves of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .chunks import WIDENS, product
from .problem import units_of


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
