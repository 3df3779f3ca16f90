"""Sigmoid loss over all pairs in a batch, without storing the whole matrix of logits."""

from .api import sigmoid_loss
from .problem import OP

__all__ = ["OP", "sigmoid_loss"]
