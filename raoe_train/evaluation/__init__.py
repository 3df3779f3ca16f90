"""What an encoder is worth: tasks of several kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train.evaluation.polarity_evaluator import PolarityEvaluator

__all__ = ["PolarityEvaluator"]


def __getattr__(name: str) -> Any:
    if name == "PolarityEvaluator":  # imported on first use: sentence-transformers takes seconds
        from raoe_train.evaluation.polarity_evaluator import PolarityEvaluator

        return PolarityEvaluator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
