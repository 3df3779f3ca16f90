"""info_nce_loss of several widths on the CPU, with the step between the matrix products in C++ (csrc/infonce)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..._native import FLOATS, address, module
from . import scan
from .weights import with_weights


def weigh(
    products: Tensor,
    of_rows: Tensor,
    of_columns: Tensor,
    own: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    along_columns: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Compute scan.weigh_in_torch in C++, all widths of a row at once."""
    losses = torch.empty_like(of_rows)
    along_rows = None if weights is None else torch.empty_like(of_rows)
    module("cpu").info_nce_widths(
        address(products), address(of_rows), address(of_columns), address(own), address(mask), address(weights),
        address(losses), address(along_rows), address(along_columns),
        *products.shape, FLOATS[products.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return losses, along_rows


forward, backward = with_weights(partial(scan.sweep, weigh=weigh))
