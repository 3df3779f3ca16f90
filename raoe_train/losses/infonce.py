"""InfoNCE with all options of sentence-transformers, and AnglE's extension of it."""

from typing import Any, ClassVar, Literal, get_args

import torch
from sentence_transformers import SentenceTransformer, util
from torch import Tensor

from raoe_kernels import cosent_loss
from raoe_train.config import NonNegativeFloat, PositiveFloat
from raoe_train.losses.base import OneSweep, check_numbers
from raoe_train.losses.gathering import gather_rows
from raoe_train.losses.in_batch import Ids, InBatchLoss
from raoe_train.losses.pairs import AnglELoss
from raoe_train.losses.reads import TRIPLETS

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc", "positive_to_positive"]
Partition = Literal["joint", "per_direction"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
ONE_WAY: list[Direction] = ["query_to_doc"]
BOTH_WAYS: tuple[Direction, ...] = ("query_to_doc", "doc_to_query")
CLASSES = (2, 0, 1)  # rank of each column's similarity to the anchor: positive, negative (contradiction), neutral


class InfoNCELoss(OneSweep, InBatchLoss):
    """Each anchor must find its positive among the positives and negatives of the whole batch, by ``info_nce_loss``.

    With one hard negative it is BeLLM's Eq. 6. The value is that of sentence-transformers' MultipleNegativesRankingLoss
    with cos_sim, for all of its options, if no text occurs twice.

    Args:
        model, scale, learn_scale, cached: see InBatchLoss and OneSweep. matryoshka_dims need one pass with the options
            symmetric and mask_duplicates, and one pass for each width with other options.
        symmetric: also let positives find their anchors; the loss is the mean of both directions. Short for
            directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        directions: similarities in the softmax, query_to_doc and optionally others; see ``info_nce_loss``. GTE's loss
            (Li et al. 2023) has four: query_to_doc, query_to_query, doc_to_query, doc_to_doc
        partition_mode: joint uses one softmax over all directions; per_direction uses the mean of one softmax for each
            direction (only query_to_doc and doc_to_query)
        hardness_mode: negatives whose logits are raised by hardness_strength x their cosine, without gradient;
            in_batch_negatives (Lan et al. 2025), hard_negatives (those of the row, as in EmbeddingGemma) or
            all_negatives
        hardness_strength: factor for the cosines of hardness_mode; 9 in Lan et al. 2025, 5 in EmbeddingGemma
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
        **contrastive: Any,
    ) -> None:
        super().__init__(model, scale, **contrastive)
        distinct = tuple(dict.fromkeys(directions))
        if partition_mode not in get_args(Partition):
            raise ValueError(f"partition_mode must be one of {', '.join(get_args(Partition))}, got {partition_mode!r}")
        if partition_mode == "per_direction" and not set(distinct) <= set(BOTH_WAYS):
            raise ValueError(f"partition_mode per_direction needs query_to_doc and doc_to_query only, got {distinct}")
        if symmetric and (distinct != ("query_to_doc",) or partition_mode != "joint"):
            raise ValueError("symmetric sets directions and partition_mode: leave these out")
        check_numbers(hardness_strength=hardness_strength)
        self.symmetric = symmetric
        self.both_ways = symmetric or (partition_mode == "per_direction" and len(distinct) == 2)
        self.directions = distinct
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength

    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        one_sweep = (self.both_ways or len(self.directions) == 1) and not (self.hardness_mode or self.learn_scale)
        if self.dims is None or one_sweep:
            return self._of_widths(embeddings, ids, self.dims)
        parts = ([column[:, :width] for column in embeddings] for width in self.dims)
        return torch.stack([self._of_widths(columns, ids, None) for columns in parts]).sum()

    def _of_widths(self, embeddings: list[Tensor], ids: Ids, dims: tuple[int, ...] | None) -> Tensor:
        """The loss of the columns, summed over `dims` if there are any."""
        form: dict[str, Any] = {"scale": self.differentiable_scale(), "dims": dims}
        hardness: dict[str, Any] = {"hardness_mode": self.hardness_mode, "hardness_strength": self.hardness_strength}
        if not self.both_ways:
            return self.contrast(embeddings, ids, directions=self.directions, **form, **hardness).sum()
        # Not the op's `symmetric`, for which every process would compute the rows of all processes.
        swapped_ids = None if ids is None else (ids[1][: len(ids[0])], ids[0])
        forward = self.contrast(embeddings, ids, **form, **hardness)
        return ((forward + self.contrast(embeddings[1::-1], swapped_ids, **form)) / 2).sum()


class AnglEContrastiveLoss(InfoNCELoss):
    """InfoNCE plus ``angle_weight`` x AnglE's angular loss, as adapted in the RAOE paper (appendix "Baseline
    Implementation for Ablations").

    The columns are anchor, positive, negative and optionally neutral; InfoNCE uses neutrals as hard negatives, too. The
    angular part is CoSENT over ``pairwise_angle_sim`` of all pairs (anchor, other column) in the batch: Angle(positive)
    < Angle(neutral) < Angle(negative), also for different anchors. The appendix has these two parts. AnglE itself has a
    third part, CoSENT over the cosines of these pairs, and scale 1 for angles (recipe angle).

    Args:
        model, scale, contrastive: see InfoNCELoss. All parts use scale; only the InfoNCE part gives a learned scale a
            gradient.
        angle_weight: weight of the angular part
        angle_scale: scale of the angular part; `scale` if None
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
        check_numbers(angle_weight=angle_weight, cosine_weight=cosine_weight)
        check_numbers(False, angle_scale=angle_scale)
        self.angle_weight = angle_weight
        self.angle_scale = angle_scale
        self.cosine_weight = cosine_weight

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None, **texts: Any) -> Tensor:
        """The scalar loss of (B, D) embeddings of the 3 or 4 columns; see InfoNCELoss."""
        if len(embeddings) not in (3, 4):
            raise ValueError(f"AnglEContrastiveLoss needs anchor, positive, negative (neutral), got {len(embeddings)}")
        loss = super().compute_loss_from_embeddings(embeddings, labels, **texts)
        loss = loss + self.angle_weight * self._order(util.pairwise_angle_sim, embeddings, self.angle_scale)
        if not self.cosine_weight:
            return loss
        return loss + self.cosine_weight * self._order(util.pairwise_cos_sim, embeddings, None)

    def _order(self, similarity_of: Any, embeddings: list[Tensor], scale: float | None) -> Tensor:
        """CoSENT with CLASSES as scores, over a similarity of two (n, D) tensors; summed over widths."""
        anchor, *rest = embeddings
        first, second = anchor.repeat(len(rest), 1), torch.cat(rest)
        widths = self.dims or (anchor.shape[1],)
        similarity = torch.stack([similarity_of(first[:, :d], second[:, :d]) for d in widths], dim=1)
        score = torch.cat([similarity.new_full((len(anchor),), CLASSES[n]) for n in range(len(rest))])
        if self.gather_across_devices:
            similarity, score = gather_rows(similarity), gather_rows(score)
        return cosent_loss(similarity.T, score, scale=scale or self.current_scale).sum()
