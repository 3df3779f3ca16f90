"""CoSENT and AnglE, drop-in for sentence-transformers' losses of these names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, util
from torch import Tensor

from raoe_kernels import cosent_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.pair_losses import PairLoss
from raoe_train.losses.widths import OneSweep


class CoSENTLoss(OneSweep, PairLoss):
    """sentence-transformers' CoSENTLoss, same arguments and values, with gradient caching and gathering.

    Args:
        model, scale, cached: see OneSweep.
        similarity_fct: (B, D), (B, D) -> (B,). Another than the cosine has no matryoshka_dims: put it into a
            MatryoshkaLoss.
    """

    by_order = True
    cites = ("huang2024cosent",)

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = util.pairwise_cos_sim,
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        self.similarity_fct = similarity_fct
        if self.dims and similarity_fct is not util.pairwise_cos_sim:
            raise ValueError("matryoshka_dims are of cosines: another similarity_fct needs a MatryoshkaLoss")

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return super().similarity(a, b) if self.similarity_fct is util.pairwise_cos_sim else self.similarity_fct(a, b)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return cosent_loss(similarity, score, scale=self.scale)


class AnglELoss(PairLoss):
    """sentence-transformers' AnglELoss: CoSENT over ``pairwise_angle_sim``, same arguments and values; see CachedLoss.

    More than two columns are an anchor, its positive and negatives: the positive's score is the label (1 without one),
    each negative's is 1 minus that.
    """

    by_order = True
    cites = ("li2024angle",)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return util.pairwise_angle_sim(a, b)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return cosent_loss(similarity, score, scale=self.scale)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        if len(embeddings) > 2:
            anchor, *others = embeddings
            positive = anchor.new_ones(len(anchor)) if labels is None else self.targets(labels, len(anchor))[0]
            labels = torch.cat([positive, *[1 - positive] * (len(others) - 1)])
            embeddings = [anchor.repeat(len(others), 1), torch.cat(others)]
        return super().compute_loss_from_embeddings(embeddings, labels)
