"""InfoNCE over in-batch and hard negatives, in all forms that sentence-transformers has."""

from typing import Any, ClassVar, Literal, get_args

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from raoe_kernels import info_nce_loss
from raoe_train.config import NonNegativeFloat, PositiveFloat
from raoe_train.losses.base import OneSweep, from_zero
from raoe_train.losses.gathering import gather_rows
from raoe_train.losses.in_batch import InBatchLoss, one_of

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc", "positive_to_positive"]
Partition = Literal["joint", "per_direction"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
ONE_WAY: list[Direction] = ["query_to_doc"]
BOTH_WAYS: tuple[Direction, ...] = ("query_to_doc", "doc_to_query")


class InfoNCELoss(OneSweep, InBatchLoss):
    """Each anchor's positive against the positives and negatives of the whole batch, over ``info_nce_loss``.

    Columns are anchor, positive and any number of hard negatives, as many rows each. One hard negative is BeLLM's
    Eq. 6; the value is that of sentence-transformers' MultipleNegativesRankingLoss with cos_sim, for all of its
    options, where no text occurs twice. Logits come and go by chunks: memory is that of the embeddings.

    Args:
        model, scale, learn_scale, cached: see InBatchLoss and OneSweep; matryoshka_dims are one sweep where
            symmetric and mask_duplicates are all that is asked for, and otherwise one a width.
        symmetric: positives are to find their anchors, too. The loss is the mean of both directions: short for
            directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction".
        directions: whose similarities the softmax is over, query_to_doc and perhaps others; see ``info_nce_loss``.
            GTE's loss (Li et al. 2023) has sentence-transformers' four: query_to_doc, query_to_query, doc_to_query,
            doc_to_doc.
        partition_mode: one softmax over all directions (joint), or the mean of one for each (per_direction, for
            query_to_doc and doc_to_query).
        hardness_mode: which logits get hardness_strength x their cosine, as a constant, on top; in_batch_negatives
            (Lan et al. 2025), hard_negatives (a row's own; EmbeddingGemma) or all_negatives.
        hardness_strength: factor of these cosines, from 0; 9 and 5 in these papers.
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
        found = tuple(dict.fromkeys(directions))
        if "query_to_doc" not in found or not set(found) <= set(get_args(Direction)):
            words = ", ".join(get_args(Direction))
            raise ValueError(f"directions must be query_to_doc and perhaps others of {words}, got {list(directions)!r}")
        one_of(
            partition_mode=(partition_mode, get_args(Partition)),
            hardness_mode=(hardness_mode, (None, *get_args(Hardness))),
        )
        if partition_mode == "per_direction" and not set(found) <= set(BOTH_WAYS):
            raise ValueError(
                "partition_mode per_direction takes directions whose softmax has the own pair, query_to_doc and "
                f"doc_to_query; got {', '.join(found)}"
            )
        if symmetric and (found != ("query_to_doc",) or partition_mode != "joint"):
            raise ValueError("symmetric is short for directions and a partition_mode: leave these out")
        from_zero(hardness_strength=hardness_strength)
        self.symmetric = symmetric
        self.directions = found
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength

    @property
    def both_ways(self) -> bool:
        """Whether the loss is the mean of query_to_doc's and doc_to_query's."""
        return self.symmetric or (self.partition_mode == "per_direction" and len(self.directions) == 2)

    def of_columns(
        self, embeddings: list[Tensor], labels: Any, texts: Tensor | None, sizes: list[int], start: int
    ) -> Tensor:
        plain = (self.both_ways or len(self.directions) == 1) and not (self.hardness_mode or self.learn_scale)
        if self.dims is None or plain:
            return self._of_widths(embeddings, texts, sizes, start, self.dims)
        cut = ([column[:, :width] for column in embeddings] for width in self.dims)
        return torch.stack([self._of_widths(columns, texts, sizes, start, None) for columns in cut]).sum()

    def _of_widths(
        self,
        embeddings: list[Tensor],
        texts: Tensor | None,
        sizes: list[int],
        start: int,
        dims: tuple[int, ...] | None,
    ) -> Tensor:
        """of_columns, the sum over `dims` where there are some."""
        hardness: dict[str, Any] = {"hardness_mode": self.hardness_mode, "hardness_strength": self.hardness_strength}
        both = self.both_ways
        if not (both or len(self.directions) == 1):
            return self.contrast(embeddings, sizes, start, texts=texts, directions=self.directions, **hardness)
        own, rows = embeddings[0], len(embeddings[0])
        # Column by column: blocks of rows of several columns would not stay in order.
        positives, *negatives = (gather_rows(column, sizes) for column in embeddings[1:])
        targets = torch.arange(start, start + rows, device=own.device)
        form: dict[str, Any] = {"scale": self.differentiable_scale(), "dims": dims, "targets": targets}
        ids = self.duplicate_ids(texts, sizes)
        ignore = None if ids is None else (ids[0][targets], ids[1])
        others = torch.cat(negatives) if negatives else None
        loss = info_nce_loss(own, positives, others, ignore=ignore, **form, **hardness)
        if both:
            # Not the op's `symmetric`: its rows are the columns of all processes, which each would compute.
            back = None if ids is None else (ids[1][targets], ids[0])
            loss = (loss + info_nce_loss(embeddings[1], gather_rows(own, sizes), ignore=back, **form)) / 2
        return loss.sum()
