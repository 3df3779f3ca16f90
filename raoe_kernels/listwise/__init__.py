"""Listwise distillation: ListMLE against a teacher, and the teacher that ranking sentences make."""

from .api import list_mle_loss, refine_similarity
from .autograd import OP

__all__ = ["OP", "list_mle_loss", "refine_similarity"]
