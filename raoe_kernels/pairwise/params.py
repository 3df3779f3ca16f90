"""What a pairwise loss is asked to do, as every backend receives it, and what backends share: backward, where one has
nothing better, and several rows of similarity as so many calls."""

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
    """The constants of one call. Tuples of these are hashable and cheap to build.

    rank, angle      which objectives are wanted
    scale            what similarities or angles are multiplied by, > 0
    threshold        (i, j) is a rank pair when 2 r_j - 2 r_i >= threshold: twice the ranks are integers under every
                     tie rule, so r_j - r_i > margin is exactly this with threshold = floor(2 margin) + 1
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
        """Shape of the losses, and what stands before B in the gradients' shape."""
        return (2,) if self.parts else ()


def make(*constants: Any, **named: Any) -> PairwiseParams:
    """Check the constants of a call, see `_make`, and bring them into the form the backends use."""
    if torch.compiler.is_compiling():
        return _make(*constants, **named)
    try:
        params = _remembered(*constants, **named)
    except TypeError:  # something that cannot be remembered: what is wrong with it is said below
        params = _make(*constants, **named)
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
        # Ranks end below 2^62, so a larger threshold means the same: no pair.
        min(math.floor(doubled) + 1, 1 << 62),
        _validate.one_of("ties", ties, TIES),
        _validate.number("rank_weight", rank_weight),
        _validate.number("angle_weight", angle_weight),
        parts,
    )


# A training run makes the same few over and over. Typed, because 1, 1.0 and True are not the same margin.
_remembered = lru_cache(maxsize=64, typed=True)(_make)


Forward = Callable[..., tuple[Tensor, Tensor | None]]


def by_row(forward: Forward) -> Forward:
    """A backend's forward of similarity (B,), as one of (K, B), too."""

    @wraps(forward)
    def of_rows(similarity: Tensor, *others, **options) -> tuple[Tensor, Tensor | None]:
        if similarity.ndim == 1:
            return forward(similarity, *others, **options)
        losses, grads = zip(*(forward(row, *others, **options) for row in similarity), strict=True)
        return torch.stack(losses, -1), None if grads[0] is None else torch.stack(grads, -2)

    return of_rows


def backward(grads: Tensor, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Sum over the parts of (gradient of the part) x (gradient from above it), in the dtype of similarity.

    grads (B,) with one upstream scalar, or (2, B) with two; or (K, B) and (2, K, B), with upstream of (K,).
    """
    if upstream[0].ndim:
        upstream = tuple(each[:, None] for each in upstream)
    if len(upstream) == 1:
        grad = grads * upstream[0]
    else:
        grad = torch.addcmul(grads[0] * upstream[0], grads[1], upstream[1])
    return grad if grad.dtype == dtype else grad.to(dtype)
