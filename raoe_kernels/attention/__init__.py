"""Bidirectional attention over padded or packed sentences, alone or together with causal attention."""

from .api import bidirectional_attention, dual_attention
from .autograd import OP

__all__ = ["OP", "bidirectional_attention", "dual_attention"]
