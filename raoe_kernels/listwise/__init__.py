"""Listwise distillation: ListMLE and ListNet against a teacher, and the teacher that ranking sentences make."""

from .api import list_mle_loss, list_net_loss, refine_similarity
from .autograd import OP

__all__ = ["OP", "list_mle_loss", "list_net_loss", "refine_similarity"]
