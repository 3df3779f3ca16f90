"""Pairwise ranking losses over a batch of sentence pairs."""

from .api import cosent_loss, gated_angular_loss, rank_margin_loss, raoe_loss
from .problem import OP

__all__ = ["OP", "cosent_loss", "gated_angular_loss", "rank_margin_loss", "raoe_loss"]
