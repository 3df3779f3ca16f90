"""Parameters of a pairwise loss as every backend receives them, and helpers that
backends share: the default backward, and a loop over the rows of a (K, B) similarity."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _validate

TIES = ("average", "min", "max", "dense", "ordinal")


class PairwiseParams(NamedTuple):
    """Constants of one call, hashable and cheap to build.

    rank, angle      whether to compute the rank-margin and the angular objective
    scale            factor for similarities or angles, > 0
    threshold        (i, j) is a rank pair if 2 r_j - 2 r_i >= threshold = floor(2 margin) + 1, which is equivalent to
                     r_j - r_i > margin because twice a rank is an integer under every tie rule
    ties             one of TIES
    rank_weight, angle_weight   factors of the two parts
    parts            True: two results, (rank part, angle part); False: their sum
    """

    rank: bool
    angle: bool
    scale: float
    threshold: int
    ties: str
    rank_weight: float
    angle_weight: float
    parts: bool

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of the losses, and the leading part of the gradients' shape, before B."""
        return (2,) if self.parts else ()


def make(*constants: Any, **options: Any) -> PairwiseParams:
    """Check the constants of a call (the arguments of `_make`) and convert them for the backends."""
    if torch.compiler.is_compiling():
        return _make(*constants, **options)
    try:
        params = _make_cached(*constants, **options)
    except TypeError:  # an argument is not hashable, so it is invalid, and _make raises the right error
        params = _make(*constants, **options)
    if params.scale < 1:
        _validate.warn_of_temperature(params.scale)
    return params


def _make(
    rank: bool,
    angle: bool,
    scale: object,
    margin: object = 0,
    ties: object = "average",
    rank_weight: object = 1.0,
    angle_weight: object = 1.0,
    parts: bool = False,
) -> PairwiseParams:
    doubled = 2 * _validate.number("margin", margin, low=0)
    return PairwiseParams(
        rank,
        angle,
        _validate.number("scale", scale, low=0, strict=True),
        # Doubled ranks are below 2^62, so any larger threshold also selects no pair.
        min(math.floor(doubled) + 1, 1 << 62),
        _validate.one_of("ties", ties, TIES),
        _validate.number("rank_weight", rank_weight),
        _validate.number("angle_weight", angle_weight),
        parts,
    )


# A training run uses the same few parameters in every step. Typed, because 1, 1.0 and True are not the same margin.
_make_cached = lru_cache(maxsize=64, typed=True)(_make)


Forward = Callable[..., tuple[Tensor, Tensor | None]]


def by_row(forward: Forward) -> Forward:
    """Decorate a backend's forward for similarity (B,) so that it also accepts (K, B), one row at a time."""

    @wraps(forward)
    def run_rows(similarity: Tensor, *arguments, **options) -> tuple[Tensor, Tensor | None]:
        if similarity.ndim == 1:
            return forward(similarity, *arguments, **options)
        losses, grads = zip(*(forward(row, *arguments, **options) for row in similarity), strict=True)
        return torch.stack(losses, -1), None if grads[0] is None else torch.stack(grads, -2)

    return run_rows


def backward(grads: Tensor, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the sum over the parts of gradient x upstream gradient, in the dtype of similarity.

    grads is (B,) with one upstream scalar or (2, B) with two; or (K, B) or (2, K, B), with upstream tensors (K,).
    """
    if upstream[0].ndim:
        upstream = tuple(x[:, None] for x in upstream)
    if len(upstream) == 1:
        grad = grads * upstream[0]
    else:
        grad = torch.addcmul(grads[0] * upstream[0], grads[1], upstream[1])
    return grad if grad.dtype == dtype else grad.to(dtype)
