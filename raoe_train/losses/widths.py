"""Losses that make those of all Matryoshka widths from one sweep over the embeddings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from raoe_train.config import PositiveFloat, PositiveInt
from raoe_train.losses.base import CachedLoss


class OneSweep(CachedLoss):
    """A loss of cosines that is the sum of those of the first `matryoshka_dims` dimensions, each as by itself: what a
    MatryoshkaLoss around it is, at little more than the time and memory of one.

    Args:
        model, scale, cached: see CachedLoss.
        matryoshka_dims: how many dimensions, increasing or not; none trains all of them, and no fewer.

    Attributes:
        dims: they, increasing, or None: what the ops take.

    Raises:
        ValueError: a width that is there twice, is below 1 or beyond the model's dimensions.
    """

    def __init__(
        self,
        model: Any,
        scale: PositiveFloat = 20.0,
        *,
        matryoshka_dims: Sequence[PositiveInt] = (),
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        widths = sorted(matryoshka_dims)
        size = getattr(model, "get_embedding_dimension", lambda: None)()
        if len(set(widths)) < len(widths) or not all(0 < width <= (size or width) for width in widths):
            most = "" if size is None else f" up to the model's {size}"
            raise ValueError(f"matryoshka_dims must be different numbers from 1{most}, got {list(matryoshka_dims)}")
        if widths and size not in (None, widths[-1]):
            warnings.warn(f"matryoshka_dims {widths} leave out all {size}, which are not trained", stacklevel=2)
        self.matryoshka_dims = list(matryoshka_dims)
        self.dims = tuple(widths) or None
