"""Cosine similarity between the corresponding rows of two matrices."""

from .api import pairwise_cosine
from .problem import OP

__all__ = ["OP", "pairwise_cosine"]
