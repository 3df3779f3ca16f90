"""Cosine similarity of each row of one matrix with the same row of another."""

from raoe_kernels.cosine.api import pairwise_cosine
from raoe_kernels.cosine.autograd import OP

__all__ = ["OP", "pairwise_cosine"]
