"""What a pairwise loss is asked to do, as every backend receives it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

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


def make(
    rank: bool,
    angle: bool,
    scale: object,
    margin: object = 0,
    ties: object = "average",
    rank_weight: object = 1.0,
    angle_weight: object = 1.0,
    parts: bool = False,
) -> PairwiseParams:
    """Check the constants and bring them into the form the backends use."""
    constants = (rank, angle, scale, margin, ties, rank_weight, angle_weight, parts)
    if torch.compiler.is_compiling():
        return _make(*constants)
    try:
        params = _remembered(*constants)
    except TypeError:  # something that cannot be remembered: what is wrong with it is said below
        params = _make(*constants)
    if params.scale < 1:
        _validate.warn_of_temperature(params.scale)
    return params


def _make(
    rank: bool,
    angle: bool,
    scale: object,
    margin: object,
    ties: object,
    rank_weight: object,
    angle_weight: object,
    parts: bool,
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
