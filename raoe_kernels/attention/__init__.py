"""Bidirectional attention over padded or packed sentences, alone and together with causal attention."""

from raoe_kernels.attention.api import bidirectional_attention, dual_attention
from raoe_kernels.attention.autograd import OP

__all__ = ["OP", "bidirectional_attention", "dual_attention"]
