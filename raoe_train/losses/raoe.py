"""RAOE's objectives: rank margin, gated angular and both together."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from raoe_kernels import gated_angular_loss, rank_margin_loss, raoe_loss
from raoe_train.losses.gathering import Gather
from raoe_train.losses.pairs import LossParts, PairLoss


class RankMarginLoss(PairLoss):
    """RAOE's rank objective (Eq. 2): pairs whose scores rank more than `margin` apart must have cosines in
    that order.

    Args:
        model: the encoder.
        scale: tau; cosines are multiplied by it.
        margin: least distance of ranks, not itself included. It is counted within the (global) batch.
        ties: how equal scores rank, a name of ``scipy.stats.rankdata``'s; equal scores are never compared but
            under "ordinal".
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: rank over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        margin: float = 2,
        ties: str = "average",
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__(model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices)
        self.margin = margin
        self.ties = ties

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        self._warn_small_batch(similarity.shape[0], self.margin)
        return rank_margin_loss(similarity, score, margin=self.margin, tau=self.scale, ties=self.ties)

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "margin": self.margin, "ties": self.ties}

    @property
    def citation(self) -> str:
        return _RAOE_CITATION


class GatedAngularLoss(PairLoss):
    """RAOE's angular objective (Eq. 3): of two pairs, the one with the larger label and the lower score must
    have the larger angle.

    Args:
        model: the encoder.
        scale: tau; angles (radians) are multiplied by it.
        gate: "label+score" as in the paper, "score" or "label" (its Table 8).
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: compare over the batches of all processes.

    Labels are whole numbers, larger = less related (entailment 0, neutral 1, contradiction 2).
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        gate: str = "label+score",
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__(model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices)
        self.gate = gate
        self.needs_label = gate != "score"

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        label = torch.zeros_like(score, dtype=torch.long) if label is None else label
        return gated_angular_loss(similarity, score, label, tau=self.scale, gate=self.gate)

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "gate": self.gate}

    @property
    def citation(self) -> str:
        return _RAOE_CITATION


class RAOELoss(PairLoss):
    """RAOE (Eq. 1): ``rank_weight`` x rank margin + ``angle_weight`` x gated angular.

    ``forward`` returns both parts, weighted, as ``{"rank", "angle"}``: the trainer adds them and logs each.
    In your own
    loop: ``sum(loss(features, labels).values()).backward()``. With ``mini_batch_size`` the gradient of both
    runs through
    ``rank``, and inside a MatryoshkaLoss such a loss returns the sum alone.

    Args:
        model: the encoder.
        scale, margin, ties, gate: as in RankMarginLoss and GatedAngularLoss.
        rank_weight, angle_weight: weights of the two parts.
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: compare over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        margin: float = 2,
        rank_weight: float = 1.0,
        angle_weight: float = 1.0,
        ties: str = "average",
        gate: str = "label+score",
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__(model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices)
        self.margin = margin
        self.rank_weight = rank_weight
        self.angle_weight = angle_weight
        self.ties = ties
        self.gate = gate
        self.needs_label = gate != "score"

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> LossParts:
        self._warn_small_batch(similarity.shape[0], self.margin)
        label = torch.zeros_like(score, dtype=torch.long) if label is None else label
        rank, angle = raoe_loss(
            similarity,
            score,
            label,
            margin=self.margin,
            tau=self.scale,
            rank_weight=self.rank_weight,
            angle_weight=self.angle_weight,
            ties=self.ties,
            gate=self.gate,
            return_parts=True,
        )
        return LossParts(rank=rank, angle=angle)

    def get_config_dict(self) -> dict[str, Any]:
        own = ("margin", "rank_weight", "angle_weight", "ties", "gate")
        return {**super().get_config_dict(), **{name: getattr(self, name) for name in own}}

    @property
    def citation(self) -> str:
        return _RAOE_CITATION


_RAOE_CITATION = """
@misc{zhou-raoe,
    title = {Rank-Awareness and Angular Constraints: A New Perspective on Learning Sentence Embeddings from
        {NLI} Data},
    author = {Zhou, Zicheng and Huang, Min and Miao, Qinghai}
}
"""
