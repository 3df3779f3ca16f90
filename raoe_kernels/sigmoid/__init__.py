"""The sigmoid loss of all pairs of a batch, without the matrix of logits."""

from .api import sigmoid_loss
from .problem import OP

__all__ = ["OP", "sigmoid_loss"]
