"""Input to the backends of pairwise_cosine (see _contract.py), and the op's registration.

`saved` holds three tensors with the result's shape: the cosine c, 1 / |a| and 1 / |b|. If at least one of the two rows
counts as a zero row, all three values are 0.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._contract import register
from .._dispatch import Op, backends, triton_missing
from .._dtypes import wide
from .._native import missing_beyond_cpu


class Problem(NamedTuple):
    """Arguments of one call. The matrices a and b have shape (B, D). If `dims` is None, the result has shape (B,).
    Otherwise, `dims` holds K increasing widths, and the result has shape (K, B)."""

    a: Tensor
    b: Tensor
    eps: float
    dims: tuple[int, ...] | None


def _similarities(problem: Problem) -> Tensor:
    a, dims = problem.a, problem.dims
    return a.new_zeros(a.shape[:1] if dims is None else (len(dims), a.shape[0]), dtype=wide(a.dtype))


OP = Op("cosine", ("pairwise_cosine",), backends(__package__, triton=triton_missing, native=missing_beyond_cpu))
cosine = register(OP, Problem, gradients=2, result=_similarities, saved=[_similarities] * 3, scale=None)
