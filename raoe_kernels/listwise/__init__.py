"""Listwise distillation: the ListMLE loss on a teacher's ranking, and refined similarities as the teacher's scores."""

from .api import list_mle_loss, refine_similarity
from .problem import OP

__all__ = ["OP", "list_mle_loss", "refine_similarity"]
