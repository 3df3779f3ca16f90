"""ListNet over lists of sentences."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer
from torch import Tensor

from raoe_kernels import list_net_loss
from raoe_train.losses.base import AboveZero, above_zero
from raoe_train.losses.listmle import ListLoss


class ListNetLoss(ListLoss):
    """Each sentence of a list chooses one of its list, and is to choose with the teacher's probabilities, over
    ``list_net_loss``: the cross entropy of softmax(scale x cosines) with softmax(teacher_scale x the teacher's).

    Of the teacher it learns how far apart sentences are, where ListMLELoss learns their order: its lists have one.

    Args:
        model, scale, cached: see ListLoss.
        teacher_scale: by which the teacher's similarities are multiplied, above 0; a larger one asks for the nearest.
    """

    name = "listnet"
    cites = ("cao2007learning",)
    needs_teacher = True

    def __init__(
        self, model: SentenceTransformer, scale: AboveZero = 20.0, *, teacher_scale: AboveZero = 20.0, **cached: Any
    ) -> None:
        super().__init__(model, scale, **cached)
        above_zero(teacher_scale=teacher_scale)
        self.teacher_scale = teacher_scale

    def of_rows(self, similarity: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return list_net_loss(similarity, teacher, tau=self.scale, teacher_tau=self.teacher_scale, mask=mask)
