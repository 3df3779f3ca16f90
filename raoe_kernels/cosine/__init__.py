"""Cosine similarity of each row of one matrix with the same row of another."""

from .api import pairwise_cosine
from .autograd import OP

__all__ = ["OP", "pairwise_cosine"]
