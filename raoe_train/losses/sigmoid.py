"""SigLIP's sigmoid loss: every pair of the batch is a question of its own."""

import math
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import sigmoid_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.gathering import averaged, gather_rows
from raoe_train.losses.in_batch import InBatchLoss


class SigmoidLoss(InBatchLoss):
    """Is a text the anchor's positive? Asked of each anchor with the positives and negatives of the whole batch, over
    ``sigmoid_loss``.

    Columns are anchor, positive and any number of hard negatives, as many rows each; labels are ignored. The value is
    SigLIP's (Zhai et al. 2023), open_clip's SigLipLoss, where no text occurs twice.

    Args:
        model, scale, cached: see InBatchLoss.
        bias: what is added to scale x the cosine. At -10 nearly all pairs are answered right when training begins: all
            but one of a batch are negatives.
        learn_scale: scale and bias are parameters: `log_scale`, within CLIP's 1 and 100, and `logit_bias`. The
            optimizer's learning rate for an encoder is small for them: for another, give
            training.learning_rate_mapping {log_scale|logit_bias: 1e-3}.

    Raises:
        ValueError: see InBatchLoss; a bias that is no finite number.
    """

    cites: ClassVar[tuple[str, ...]] = ("zhai2023sigmoid",)

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 10.0,
        *,
        bias: float = -10.0,
        learn_scale: bool = True,
        **contrastive: Any,
    ) -> None:
        super().__init__(model, scale, learn_scale=learn_scale, **contrastive)
        if isinstance(bias, (bool, str)) or not math.isfinite(bias):
            raise ValueError(f"bias must be a number, got {bias!r}")
        self.bias = bias
        if learn_scale:
            self.logit_bias = nn.Parameter(torch.tensor(float(bias)))

    def of_columns(
        self, embeddings: list[Tensor], labels: Any, texts: Tensor | None, sizes: list[int], start: int
    ) -> Tensor:
        own = embeddings[0]
        # Column by column: blocks of rows of several columns would not stay in order.
        columns = torch.cat([gather_rows(column, sizes) for column in embeddings[1:]])
        targets = torch.arange(start, start + len(own), device=own.device)
        ids = self.duplicate_ids(texts, sizes)
        ignore = None if ids is None else (ids[0][targets], ids[1])
        bias: Any = averaged(self.logit_bias) if self.learn_scale else self.bias
        return sigmoid_loss(
            own, columns, scale=self.differentiable_scale(), bias=bias, targets=targets, ignore=ignore
        )
