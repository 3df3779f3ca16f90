"""GISTEmbed: a frozen guide says which columns of the batch are false negatives."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from raoe_train.config import PositiveFloat
from raoe_train.losses.in_batch import InBatchLoss, one_of
from raoe_train.losses.reads import TRIPLETS_WITH_TEXTS

MarginStrategy = Literal["absolute", "relative"]


class GISTLoss(InBatchLoss):
    """In-batch contrast without the columns that a guide finds too similar to be negatives (Solatorio 2024), over
    ``info_nce_loss``.

    The value is that of sentence-transformers' GISTEmbedLoss and CachedGISTEmbedLoss, with scale 1 / temperature, where
    no text occurs twice. Columns are anchor, positive and any number of hard negatives, with labels {"texts": the
    columns' texts, B strings each} from raoe_train.TextCollator: the guide has a tokenizer and a prompt of its own. Its
    cosines come and go with the chunks of logits.

    Args:
        model, scale, learn_scale, cached: see InBatchLoss. Under gather_across_devices anchors are
            contrasted with those of all processes (sentence-transformers': of their own), so that the value is the
            whole batch's.
        embed: n sentences -> the guide's embeddings, [n, G] float32, of any dimension G. It is no part of this module,
            so nothing trains, moves or saves it. raoe_train.encoders.embed makes one (`embedder`, and `remembered`
            with what was made before); recipes by their section `teacher`.
        margin_strategy: what margin is, absolute or relative; a column is left out where the guide's cosine is above
            that of the row's own pair, less margin, or less margin times its absolute value.
        margin: how far below the positive's a column's similarity must be.
        contrast_anchors: anchors are each other's negatives, too.
        contrast_positives: positives are each other's negatives, too.
        mask_duplicates: also leave out texts that are the same, or that a chain of pairs links, see InfoNCELoss's
            directions.
    """

    reads = TRIPLETS_WITH_TEXTS
    asks_teacher = True
    cites: ClassVar[tuple[str, ...]] = ("solatorio2024gistembed",)

    def __init__(
        self,
        model: SentenceTransformer,
        embed: Callable[[Sequence[str]], np.ndarray],
        scale: PositiveFloat = 100.0,
        *,
        margin_strategy: MarginStrategy = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        **contrastive: Any,
    ) -> None:
        super().__init__(model, scale, **contrastive)
        one_of(margin_strategy=(margin_strategy, get_args(MarginStrategy)))
        if not math.isfinite(margin):
            raise ValueError(f"margin must be a number, got {margin!r}")
        self.margin_strategy = margin_strategy
        self.margin = margin
        self.contrast_anchors = contrast_anchors
        self.contrast_positives = contrast_positives
        self._embed = embed
        self._guided: tuple[Any, list[Tensor]] = (None, [])

    def of_columns(
        self, embeddings: list[Tensor], labels: Any, texts: Tensor | None, sizes: list[int], start: int
    ) -> Tensor:
        directions = ["query_to_doc"]
        directions += ["query_to_query"] * self.contrast_anchors + ["positive_to_positive"] * self.contrast_positives
        guide = self._guide(labels, [len(column) for column in embeddings], embeddings[0].device)
        margins: dict[str, Any] = {"guide_margin": self.margin, "margin_strategy": self.margin_strategy}
        return self.contrast(
            embeddings, sizes, start, texts=texts, guide=guide, directions=tuple(directions), **margins
        )

    def _guide(self, labels: Any, rows: list[int], device: torch.device) -> list[Tensor]:
        """The guide's embeddings of each column, (B, G); a MatryoshkaLoss asks for those of a batch more than once."""
        if labels is not None and labels is self._guided[0]:
            return self._guided[1]
        texts = labels.get("texts") if isinstance(labels, Mapping) else None
        if texts is None:
            raise ValueError("GISTLoss needs the batch's texts for its guide: use raoe_train.TextCollator")
        if [len(column) for column in texts] != rows:
            raise ValueError(
                f"GISTLoss needs a text for each row and column, got {[len(column) for column in texts]} texts and "
                f"{rows} embeddings"
            )
        # One call: the guide encodes each distinct sentence once, sorted by length.
        made = torch.from_numpy(self._embed([text for column in texts for text in column])).to(device)
        if made.ndim != 2 or len(made) != sum(rows):
            raise ValueError(f"the guide must give {sum(rows)} rows, one a text, got shape {tuple(made.shape)}")
        self._guided = (labels, list(made.split(rows)))
        return self._guided[1]
