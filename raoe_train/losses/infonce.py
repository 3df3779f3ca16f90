"""InfoNCE with all of sentence-transformers' options, and AnglE's extension of InfoNCE."""

from typing import Any, ClassVar, Literal, TypedDict

import torch
from sentence_transformers import SentenceTransformer, util
from torch import Tensor
from typing_extensions import Unpack

from raoe_kernels import cosent_loss
from raoe_train.config import NonNegativeFloat, PositiveFloat, convert
from raoe_train.losses.base import OneSweep, gather_rows
from raoe_train.losses.collators import TRIPLETS
from raoe_train.losses.in_batch import Ids, InBatchLoss
from raoe_train.losses.pairs import AnglELoss

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc", "positive_to_positive"]
Partition = Literal["joint", "per_direction"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
ONE_WAY: list[Direction] = ["query_to_doc"]
Contrastive = TypedDict("Contrastive", {  # keywords of InfoNCELoss's base classes, for type checkers  # noqa: UP013
    "mask_duplicates": bool, "matryoshka_dims": list[int] | tuple[int, ...],
    "mini_batch_size": int | None, "mini_batch_num_tokens": int | None, "gather_across_devices": bool,
}, total=False)  # fmt: skip
BOTH_WAYS: tuple[Direction, ...] = ("query_to_doc", "doc_to_query")
RANKS = (2, 0, 1)  # ranks of positive, negative (contradiction) and neutral by their similarity to the anchor


class InfoNCELoss(OneSweep, InBatchLoss):
    """Train each anchor to find its positive among all positives and negatives in the batch, with ``info_nce_loss``.

    With one hard negative per row, the loss is Eq. 6 of the BeLLM paper. If no text occurs twice, the loss equals that
    of sentence-transformers' MultipleNegativesRankingLoss with cos_sim and the same options.

    Args:
        model, scale, **contrastive: see InBatchLoss and OneSweep. With matryoshka_dims, one pass computes the loss for
            all widths; with several joint directions or with hardness_mode, each width takes one pass.
        symmetric: also train positives to find their anchors; the loss is the mean over both directions. Short for
            directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        directions: kinds of pairs in the softmax (see ``info_nce_loss``); query_to_doc is required. GTE's loss
            (Li et al. 2023) uses query_to_doc, query_to_query, doc_to_query and doc_to_doc
        partition_mode: joint uses one softmax over all directions; per_direction averages one loss per direction, and
            allows only query_to_doc and doc_to_query
        hardness_mode: add hardness_strength x cosine, without gradient, to the logits of these negatives:
            in_batch_negatives (Lan et al. 2025), hard_negatives (the row's own, as in EmbeddingGemma) or all_negatives
        hardness_strength: factor for the cosines in hardness_mode; 9 in Lan et al. 2025, 5 in EmbeddingGemma
    """

    cites: ClassVar[tuple[str, ...]] = ("oord2018representation", "li2024bellm")

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        *,
        symmetric: bool = False,
        directions: list[Direction] = ONE_WAY,
        partition_mode: Partition = "joint",
        hardness_mode: Hardness | None = None,
        hardness_strength: NonNegativeFloat = 0.0,
        **contrastive: Unpack[Contrastive],
    ) -> None:
        super().__init__(model, scale, **contrastive)
        distinct = tuple(dict.fromkeys(convert("directions", directions, list[Direction])))
        if partition_mode == "per_direction" and not set(distinct) <= set(BOTH_WAYS):
            raise ValueError(f"partition_mode {partition_mode!r} allows only {' and '.join(BOTH_WAYS)}, got {distinct}")
        if symmetric and (distinct != ("query_to_doc",) or partition_mode != "joint"):
            raise ValueError("symmetric already sets directions and partition_mode: remove these two settings")
        self.symmetric = symmetric
        self.both_ways = symmetric or (partition_mode == "per_direction" and len(distinct) == 2)
        self.directions = distinct
        self.partition_mode: Partition = convert("partition_mode", partition_mode, Partition)
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength

    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        one_sweep = (self.both_ways or len(self.directions) == 1) and not self.hardness_mode
        if self.dims is None or one_sweep:
            return self._of_widths(embeddings, ids, self.dims)
        parts = ([column[:, :width] for column in embeddings] for width in self.dims)
        return torch.stack([self._of_widths(columns, ids, None) for columns in parts]).sum()

    def _of_widths(self, embeddings: list[Tensor], ids: Ids, dims: tuple[int, ...] | None) -> Tensor:
        """Return the loss of the columns' embeddings, summed over the widths in `dims` (None: only the full width)."""
        form: dict[str, Any] = {"scale": self.scale, "dims": dims}
        hardness: dict[str, Any] = {"hardness_mode": self.hardness_mode, "hardness_strength": self.hardness_strength}
        if not self.both_ways:
            return self.contrast(embeddings, ids, directions=self.directions, **form, **hardness).sum()
        # The op's `symmetric` is not used: with it, every process would compute the rows of all processes.
        swapped_ids = None if ids is None else (ids[1][: len(ids[0])], ids[0])
        forward = self.contrast(embeddings, ids, **form, **hardness)
        return ((forward + self.contrast(embeddings[1::-1], swapped_ids, **form)) / 2).sum()


class AnglEContrastiveLoss(InfoNCELoss):
    """InfoNCE plus ``angle_weight`` x AnglE's angular loss, as adapted in the RAOE paper (appendix "Baseline
    Implementation for Ablations").

    The columns are anchor, positive, negative and optionally neutral. InfoNCE uses neutrals as additional hard
    negatives. The angular part is CoSENT over ``pairwise_angle_sim`` between each anchor and the other texts in its
    row. The loss trains the angles to satisfy Angle(positive) < Angle(neutral) < Angle(negative), also across anchors.
    The appendix uses only InfoNCE and the angular part. The original AnglE (recipe `angle`) also adds CoSENT over the
    cosines of the same pairs, and uses a scale of 1 for angles.

    Args:
        model, scale, **contrastive: see InfoNCELoss. By default, all parts use `scale`.
        angle_weight: weight of the angular part
        angle_scale: scale of the angular part; by default, `scale`
        cosine_weight: weight of CoSENT over cosines
    """

    reads, allows_missing = TRIPLETS, False
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
        self.angle_weight: float = convert("angle_weight", angle_weight, NonNegativeFloat)
        self.angle_scale = angle_scale
        self.cosine_weight: float = convert("cosine_weight", cosine_weight, NonNegativeFloat)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None, **texts: Any) -> Tensor:
        if len(embeddings) not in (3, 4):
            raise ValueError(f"AnglEContrastiveLoss needs 3 columns, or 4 with neutral texts, got {len(embeddings)}")
        loss = super().compute_loss_from_embeddings(embeddings, labels, **texts)
        loss = loss + self.angle_weight * self._order(util.pairwise_angle_sim, embeddings, self.angle_scale)
        if not self.cosine_weight:
            return loss
        return loss + self.cosine_weight * self._order(util.pairwise_cos_sim, embeddings, None)

    def _order(self, similarity_of: Any, embeddings: list[Tensor], scale: float | None) -> Tensor:
        """Return CoSENT over the similarities between each anchor and the other texts in its row, scored by RANKS."""
        anchor, *rest = embeddings
        first, second = anchor.repeat(len(rest), 1), torch.cat(rest)
        widths = self.dims or (anchor.shape[1],)
        similarity = torch.stack([similarity_of(first[:, :d], second[:, :d]) for d in widths], dim=1)
        score = torch.cat([similarity.new_full((len(anchor),), RANKS[n]) for n in range(len(rest))])
        if self.gather_across_devices:
            similarity, score = gather_rows(similarity), gather_rows(score)
        return cosent_loss(similarity.T, score, scale=self.scale if scale is None else scale).sum()
