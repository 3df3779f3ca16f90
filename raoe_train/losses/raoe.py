"""RAOE's objectives: rank margin, gated angular, and the sum of the two."""

from collections.abc import Mapping
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from torch import Tensor

from raoe_kernels import gated_angular_loss, rank_margin_loss, raoe_loss
from raoe_train.config import NonNegativeFloat, PositiveFloat, convert
from raoe_train.losses.base import LossParts, OneSweep
from raoe_train.losses.pairs import PairLoss

Ties = Literal["average", "min", "max", "dense", "ordinal"]
Gate = Literal["label+score", "score", "label"]


class RankMarginLoss(OneSweep, PairLoss):
    """RAOE's rank objective (Eq. 2): train the cosines of two pairs to have the same order as their scores, if the
    ranks of their scores differ by more than `margin`.

    Args:
        model, scale, **cached: arguments of OneSweep.
        margin: two pairs are compared only if their score ranks in the (gathered) batch differ by more than this number
        ties: how to rank equal scores (`method` of scipy's rankdata); only "ordinal" compares pairs with equal scores
    """

    exact_scores = reads_order = True
    cites = ("zhou-raoe",)

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        margin: NonNegativeFloat = 2,
        ties: Ties = "average",
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        self.margin = margin
        self.ties = ties

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Any:
        return rank_margin_loss(similarity, score, margin=self.margin, scale=self.scale, ties=self.ties)


class _Gated(PairLoss):
    """Base class of losses with the keyword `gate`. These losses need NLI labels unless `gate` is "score"."""

    @classmethod
    def needs_label(cls, keywords: Mapping[str, Any]) -> bool:
        return keywords.get("gate", "label+score") != "score"


class GatedAngularLoss(OneSweep, _Gated):
    """RAOE's angular objective (Eq. 3): of two pairs, the pair with the larger label and the lower score must have the
    larger angle.

    Args:
        model, scale, **cached: arguments of OneSweep; scale multiplies angles in radians.
        gate: compare only pairs that differ in label and score (label+score, as in the paper), in score (score), or in
            label (label, as in the paper's Table 8)

    Labels are whole numbers from 0; a larger label means less related (entailment 0, neutral 1, contradiction 2).
    """

    exact_scores = reads_order = True
    cites = ("zhou-raoe",)

    def __init__(
        self, model: SentenceTransformer, scale: PositiveFloat = 20.0, gate: Gate = "label+score", **cached: Any
    ) -> None:
        super().__init__(model, scale, **cached)
        self.gate = gate

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return gated_angular_loss(similarity, score, label, scale=self.scale, gate=self.gate)


class RAOELoss(RankMarginLoss, _Gated):
    """RAOE's objective (Eq. 1): the sum ``rank_weight`` x RankMarginLoss + ``angle_weight`` x GatedAngularLoss.

    ``forward`` returns both weighted parts as ``{"rank": …, "angle": …}``. The trainer adds up the parts and logs each
    part. In your own loop, write ``sum(loss(features, labels).values()).backward()``. With ``mini_batch_size``, the
    gradient of both parts is attached to ``rank``, and a MatryoshkaLoss around RAOELoss returns only the sum of the
    two parts.

    Args:
        model, scale, **cached: arguments of OneSweep.
        margin: the rank part compares two pairs only if their score ranks differ by more than this number
        rank_weight: weight of the rank part
        angle_weight: weight of the angular part
        ties: how to rank equal scores, as `method` of scipy's rankdata
        gate: the angular part compares only pairs that differ in label and score (label+score), in score (score), or
            in label (label)
    """

    reads_order = True

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        margin: NonNegativeFloat = 2,
        rank_weight: NonNegativeFloat = 1.0,
        angle_weight: NonNegativeFloat = 1.0,
        ties: Ties = "average",
        gate: Gate = "label+score",
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, margin, ties, **cached)
        self.rank_weight: float = convert("rank_weight", rank_weight, NonNegativeFloat)
        self.angle_weight: float = convert("angle_weight", angle_weight, NonNegativeFloat)
        self.gate = gate

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> LossParts:
        terms: dict[str, Any] = {"margin": self.margin, "ties": self.ties, "gate": self.gate}
        terms |= {"rank_weight": self.rank_weight, "angle_weight": self.angle_weight}
        rank, angle = raoe_loss(similarity, score, label, scale=self.scale, return_parts=True, **terms)
        return LossParts(rank=rank, angle=angle)
