"""AnglE on NLI triplets: in-batch contrast and an order of angles, with neutral hypotheses or without."""

from typing import Any

import torch
from sentence_transformers import SentenceTransformer, util
from torch import Tensor

from raoe_kernels import cosent_loss
from raoe_train.config import NonNegativeFloat, PositiveFloat
from raoe_train.losses.base import above_zero, from_zero
from raoe_train.losses.gathering import gather_pairs
from raoe_train.losses.infonce import InfoNCELoss
from raoe_train.losses.pairs import AnglELoss

CLASSES = (2, 0, 1)  # how alike a column is to the anchor: positive, negative (contradiction), neutral


class AnglEContrastiveLoss(InfoNCELoss):
    """InfoNCE plus ``angle_weight`` x AnglE's order of angles: the RAOE paper's adaptation of AnglE (its appendix,
    "Baseline Implementation for Ablations").

    Columns are anchor, positive, negative and, perhaps, neutral; to InfoNCE neutrals are hard negatives, too. The
    angular part is CoSENT over ``pairwise_angle_sim`` of the batch's pairs (anchor, other column), Angle(positive) <
    Angle(neutral) < Angle(negative) of whichever anchors. The appendix speaks of these two parts. AnglE itself has a
    third, CoSENT over cosines of the same pairs, and a scale of 1 for angles (recipe angle).

    Args:
        model, scale, contrastive: see InfoNCELoss; scale is that of all parts, and learned by the contrastive one.
        angle_weight: weight of the angular part, from 0.
        angle_scale: the angular part's scale, above 0, where it differs.
        cosine_weight: weight of CoSENT over cosines, from 0.
    """

    cites = AnglELoss.cites + InfoNCELoss.cites

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        *,
        angle_weight: NonNegativeFloat = 1.0,
        angle_scale: PositiveFloat | None = None,
        cosine_weight: NonNegativeFloat = 0.0,
        **contrastive: Any,
    ) -> None:
        super().__init__(model, scale, **contrastive)
        from_zero(angle_weight=angle_weight, cosine_weight=cosine_weight)
        if angle_scale is not None:
            above_zero(angle_scale=angle_scale)
        self.angle_weight = angle_weight
        self.angle_scale = angle_scale
        self.cosine_weight = cosine_weight

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Any = None, *, texts: Tensor | None = None
    ) -> Tensor:
        """The loss, (), of (B, D) embeddings of the 3 or 4 columns; see InfoNCELoss."""
        if len(embeddings) not in (3, 4):
            raise ValueError(
                f"AnglEContrastiveLoss takes anchor, positive, negative, perhaps neutral; got {len(embeddings)} columns"
            )
        loss = super().compute_loss_from_embeddings(embeddings, labels, texts=texts)
        loss = loss + self.angle_weight * self._order(util.pairwise_angle_sim, embeddings, self.angle_scale)
        if not self.cosine_weight:
            return loss
        return loss + self.cosine_weight * self._order(util.pairwise_cos_sim, embeddings, None)

    def _order(self, similarity_of: Any, embeddings: list[Tensor], scale: float | None) -> Tensor:
        """CoSENT of the classes over a similarity of two (n, D), summed over widths."""
        anchor, *others = embeddings
        first, second = anchor.repeat(len(others), 1), torch.cat(others)
        widths = self.dims or (anchor.shape[1],)
        similarity = torch.stack([similarity_of(first[:, :d], second[:, :d]) for d in widths], dim=1)
        score = torch.cat([similarity.new_full((len(anchor),), CLASSES[n]) for n in range(len(others))])
        if self.gather_across_devices:
            similarity, score, _ = gather_pairs(similarity, score, None, uneven=self.uneven)
        return cosent_loss(similarity.T, score, scale=scale or self.current_scale).sum()
