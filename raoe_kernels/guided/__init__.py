"""Dual-context guided decoding: next-token log-probabilities that combine two contexts."""

from .api import guided_argmax, guided_log_probs
from .problem import OP

__all__ = ["OP", "guided_argmax", "guided_log_probs"]
