"""SigLIP's sigmoid loss: every pair of the batch is a question of its own."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import sigmoid_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.gathering import averaged, visited
from raoe_train.losses.in_batch import InBatchLoss


class SigmoidLoss(InBatchLoss):
    """Is a text the anchor's positive? Asked of each anchor with the positives and negatives of the whole batch, over
    ``sigmoid_loss``.

    Columns are anchor, positive and any number of hard negatives, as many rows each; labels are ignored. The value is
    SigLIP's (Zhai et al. 2023), open_clip's SigLipLoss, where no text occurs twice. There is no softmax: gathered, a
    process holds one other process's columns at a time, and what they add to their gradient goes back at once. There
    the loss is to be differentiated with the same factor before it in all processes, as a trainer does.

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
        anchors, columns = embeddings[0], torch.stack(embeddings[1:])
        ids = self.duplicate_ids(texts, sizes)
        rows = torch.arange(start, start + len(anchors), device=anchors.device)
        scale: Any = self.differentiable_scale()
        bias: Any = averaged(self.logit_bias) if self.learn_scale else self.bias

        def part(process: int, anchors: Tensor, columns: Tensor, *learned: Tensor) -> Tensor:
            """Of the columns of one process, (columns, its rows, D)."""
            first = sum(sizes[:process])
            ignore = None
            if ids is not None:
                theirs = ids[1].reshape(len(columns), -1)[:, first : first + sizes[process]]
                ignore = (ids[0][rows], theirs.flatten())
            targets = rows - first if first == start else torch.full_like(rows, -1)
            numbers = dict(zip(("scale", "bias"), learned or (scale, bias), strict=True))
            return sigmoid_loss(anchors, columns.flatten(0, 1), targets=targets, ignore=ignore, **numbers)

        learned = (scale, bias) if self.learn_scale else ()
        if len(sizes) == 1:
            return part(0, anchors, columns, *learned)
        return visited(part, sizes, anchors, columns, *learned)
