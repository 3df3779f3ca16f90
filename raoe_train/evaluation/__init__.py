"""Evaluation of encoders on tasks of several kinds."""

from raoe_train.evaluation.polarity import PolarityEvaluator

__all__ = ["PolarityEvaluator"]
