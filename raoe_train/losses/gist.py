"""GISTEmbed: InfoNCE without likely false negatives, which a guide encoder detects."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from raoe_train.config import PositiveFloat
from raoe_train.encoders.embed import Embed
from raoe_train.losses.collators import ROWS_WITH_TEXTS
from raoe_train.losses.in_batch import Ids, InBatchLoss

MarginStrategy = Literal["absolute", "relative"]


class GISTLoss(InBatchLoss):
    """InfoNCE without likely false negatives, which a guide encoder detects (GISTEmbed, Solatorio 2024).

    If no text occurs twice, the loss equals that of sentence-transformers' GISTEmbedLoss and CachedGISTEmbedLoss with
    temperature 1 / scale. The guide encodes the texts in `labels`, which TextCollator adds.

    Args:
        model, scale, **contrastive: arguments of InBatchLoss. With gather_across_devices, contrast_anchors uses the
            anchors of all processes. (sentence-transformers uses only the anchors of the same process.)
        embed: the guide, which is a SentenceTransformer or a function that maps n sentences to float32 embeddings
            [n, D'] of any dimension D'. The guide is not a submodule of the loss, so it is not trained, moved to a
            device or saved. In recipes, the section `teacher` sets the guide (raoe_train.encoders.embed.embedder).
        margin_strategy: absolute or relative. Let p be the guide's cosine for the positive pair. A negative is excluded
            if the guide's cosine for this negative exceeds p - margin (absolute) or p - margin x |p| (relative)
        margin: by how much the guide's cosine for the positive pair must exceed its cosine for a negative; otherwise
            the negative is excluded. If margin is below 0, the positive pair is kept (sentence-transformers excludes
            the positive pair)
        contrast_anchors: also use other anchors as negatives for each anchor
        contrast_positives: also use other positives as negatives for each positive
    """

    reads = ROWS_WITH_TEXTS
    asks_teacher = True
    _embed: Any = None  # the guide as a function, which is None in copies for planning (see without_modules)
    cites: ClassVar[tuple[str, ...]] = ("solatorio2024gistembed",)

    def __init__(
        self,
        model: SentenceTransformer,
        embed: Embed,
        scale: PositiveFloat = 100.0,
        *,
        margin_strategy: MarginStrategy = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        **contrastive: Any,
    ) -> None:
        super().__init__(model, scale, **contrastive)
        self.margin_strategy = margin_strategy
        self.margin = margin
        self.contrast_anchors = contrast_anchors
        self.contrast_positives = contrast_positives
        vars(self)["_embed"] = getattr(embed, "encode", embed)  # so that a module is not registered as a submodule
        self._guided: tuple[Any, list[Tensor]] = (None, [])

    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        if labels is None or labels is not self._guided[0]:  # a MatryoshkaLoss calls this once per width
            self._guided = (labels, teacher_embeddings(self._embed, labels, embeddings))
        directions: tuple[str, ...] = ("query_to_doc",)
        if self.contrast_anchors:
            directions += ("query_to_query",)
        if self.contrast_positives:
            directions += ("positive_to_positive",)
        form: dict[str, Any] = {"guide_margin": self.margin, "margin_strategy": self.margin_strategy}
        return self.contrast(embeddings, ids, self._guided[1], directions, scale=self.scale, **form)


def teacher_embeddings(embed: Embed, labels: Any, columns: list[Tensor]) -> list[Tensor]:
    """Return the teacher's embeddings (B, D') of each column's texts. Raise ValueError for labels without texts."""
    texts = labels.get("texts") if isinstance(labels, Mapping) else None
    if texts is None:
        raise ValueError("a teacher needs the batch's texts: use raoe_train.TextCollator")
    # use one call, so that the teacher encodes each distinct sentence once, sorted by length
    embeddings = torch.as_tensor(embed([text for column in texts for text in column]), device=columns[0].device)
    return [*embeddings.split([len(column) for column in columns])]
