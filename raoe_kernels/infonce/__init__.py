"""InfoNCE with in-batch and hard negatives, without storing the whole matrix of logits."""

from .api import info_nce_loss
from .problem import OP

__all__ = ["OP", "info_nce_loss"]
