"""Cosine similarity between the corresponding rows of two matrices."""

from .api import pairwise_cosine
from .autograd import OP

__all__ = ["OP", "pairwise_cosine"]
