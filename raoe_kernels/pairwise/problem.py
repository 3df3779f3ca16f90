"""Input to the backends of the pairwise losses (see _contract.py), the op's registration, and `by_row`, which processes
a (K, B) similarity row by row for backends that accept only shape (B,)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _validate
from .._contract import Gradients, Needs, register
from .._dispatch import Op, backends, triton_missing
from .._dtypes import wide
from .._native import missing as native_missing

TIES = ("average", "min", "max", "dense", "ordinal")
# Maximum number of pairs in one launch of the Triton kernel. For 4,096 pairs, sixteen warps would not have enough
# registers, and the kernel would take half a minute to compile.
ONE_BLOCK = 2048
ONE_BLOCK_DOUBLE = 1024  # maximum for float64 similarity or 64-bit sort keys (2,048 pairs would spill registers)


class Problem(NamedTuple):
    """Arguments of one call. The losses have shape (), or (2,) with `parts`. If similarity has shape (K, B), the losses
    have shape (K,), or (2, K) with `parts`.

    Attributes:
        similarity: (B,) or (K, B); backends are called only if B >= 1
        scores: (B,) float32, float64 or int64
        labels: (B,) int64, or None
        rank, angle: whether to compute the rank-margin and the angular objective
        scale: factor for similarities or angles, > 0
        margin: pairs i and j are compared if r_j - r_i > margin
        ties: one of TIES
        rank_weight, angle_weight: factors of the two parts
        parts: whether the result is (rank part, angle part) instead of the sum of both parts
    """

    similarity: Tensor
    scores: Tensor
    labels: Tensor | None
    rank: bool
    angle: bool
    scale: float
    margin: float
    ties: str
    rank_weight: float
    angle_weight: float
    parts: bool

    @property
    def leading(self) -> tuple[int, ...]:
        """First dimensions of the losses and of their gradients: () or, with `parts`, (2,)."""
        return (2,) if self.parts else ()

    @property
    def threshold(self) -> int:
        """Return the threshold floor(2 margin) + 1. Pairs i and j are compared if 2 r_j - 2 r_i is at least this
        threshold. Doubled ranks 2 r are integers below 2^62."""
        return math.floor(min(2 * self.margin, 2.0**62)) + 1

    def max_pairs(self) -> int:
        """Largest number of pairs that the Triton kernel supports for the dtype of `similarity`."""
        return ONE_BLOCK_DOUBLE if self.similarity.dtype == torch.float64 else ONE_BLOCK


def constants(*values: Any, **options: Any) -> tuple[Any, ...]:
    """Check a call's options (the arguments of `_check`), and return a Problem's fields, starting with `rank`."""
    if torch.compiler.is_compiling():
        return _check(*values, **options)
    try:
        fields = _check_cached(*values, **options)
    except TypeError:  # an argument that is not hashable is invalid, and _check raises the appropriate error
        fields = _check(*values, **options)
    if (scale := fields[2]) < 1:
        _validate.warn_of_temperature(scale)
    return fields


def _check(
    rank: bool,
    angle: bool,
    scale: object,
    margin: object = 0,
    ties: object = "average",
    rank_weight: object = 1.0,
    angle_weight: object = 1.0,
    parts: bool = False,
) -> tuple[Any, ...]:
    return (
        rank,
        angle,
        _validate.number("scale", scale, low=0, strict=True),
        _validate.number("margin", margin, low=0),
        _validate.one_of("ties", ties, TIES),
        _validate.number("rank_weight", rank_weight),
        _validate.number("angle_weight", angle_weight),
        parts,
    )


# A training run passes the same options at every step, so the result of the check is cached (typed: True must not
# match 1).
_check_cached = lru_cache(maxsize=64, typed=True)(_check)


def _losses(problem: Problem) -> Tensor:
    c = problem.similarity
    return c.new_zeros((*problem.leading, *c.shape[:-1]), dtype=wide(c.dtype))


def _gradients(problem: Problem) -> Tensor:
    c = problem.similarity
    return c.new_zeros((*problem.leading, *c.shape), dtype=wide(c.dtype))


def scaled(problem: Problem, saved: Gradients, upstream: Tensor, needs: Needs, dtype: torch.dtype) -> Gradients:
    """Return the gradient with respect to similarity: the sum of each part's gradient times its upstream gradient."""
    grads: Any = saved[0]
    upstream = upstream[..., None] if upstream.ndim else upstream
    grad = torch.addcmul(grads[0] * upstream[0], grads[1], upstream[1]) if problem.parts else grads * upstream
    return (grad if grad.dtype == dtype else grad.to(dtype),)


OP = Op(
    "pairwise",
    ("rank_margin_loss", "gated_angular_loss", "raoe_loss", "cosent_loss"),
    backends(__package__, triton=triton_missing, native=native_missing),
    by_case=lambda problem: "triton" if problem.similarity.shape[-1] <= problem.max_pairs() else "scan",
)
pairwise = register(OP, Problem, gradients=1, result=_losses, saved=[_gradients], scale=scaled)

Forward = Callable[..., tuple[Tensor, Gradients]]


def by_row(forward: Forward) -> Forward:
    """Extend a backend's `forward` from similarities of shape (B,) to (K, B), by calling it once for each row."""

    @wraps(forward)
    def run_rows(problem: Problem, needs: Needs, **options: Any) -> tuple[Tensor, Gradients]:
        if problem.similarity.ndim == 1:
            return forward(problem, needs, **options)
        rows = [forward(problem._replace(similarity=row), needs, **options) for row in problem.similarity]
        grads = torch.stack([grad for _, (grad,) in rows], -2) if needs[0] else None  # type: ignore[misc]
        return torch.stack([loss for loss, _ in rows], -1), (grads,)

    return run_rows
