"""Dual-context guided decoding: the next token's log-probabilities mixed from two contexts."""

from .api import guided_argmax, guided_log_probs
from .autograd import OP

__all__ = ["OP", "guided_argmax", "guided_log_probs"]
