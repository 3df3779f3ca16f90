"""What an encoder is worth: tasks of several kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raoe_train.artifacts.lazy import exports

if TYPE_CHECKING:
    from raoe_train.evaluation.polarity import PolarityEvaluator

__all__ = ["PolarityEvaluator"]
__getattr__ = exports(__name__, {"polarity": __all__})
