"""SigLIP's sigmoid loss: every pair of the batch is a question of its own."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import sigmoid_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.duplicates import Duplicates, duplicates
from raoe_train.losses.gathering import averaged, gather_rows, visited
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
        mask_duplicates: leave false negatives out, see InfoNCELoss.

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
        same = duplicates(gather_rows(texts, sizes)) if texts is not None and self.mask_duplicates else None
        rows = torch.arange(start, start + len(anchors), device=anchors.device)

        scale: Any = self.differentiable_scale()
        bias: Any = averaged(self.logit_bias) if self.learn_scale else self.bias

        def part(process: int, anchors: Tensor, columns: Tensor, *learned: Tensor) -> Tensor:
            """Of the columns of one process, (columns, its rows, D)."""
            first = sum(sizes[:process])
            here = None
            if same is not None:
                theirs = same.columns.reshape(len(columns), -1)[:, first : first + sizes[process]]
                here = same._replace(rows=same.rows[rows], columns=theirs.flatten())
            targets = rows - first if first == start else torch.full_like(rows, -1)
            numbers = dict(zip(("scale", "bias"), learned or (scale, bias), strict=True))
            return _compared(anchors, columns.flatten(0, 1), targets, here, **numbers)

        learned = (scale, bias) if self.learn_scale else ()
        if len(sizes) == 1:
            return part(0, anchors, columns, *learned)
        return visited(part, sizes, anchors, columns, *learned)


def _compared(anchors: Tensor, columns: Tensor, targets: Tensor, same: Duplicates | None, **numbers: Any) -> Tensor:
    """Mean over the anchors of sigmoid_loss, without the pairs that are duplicates."""

    def loss(which: Any, ignore: Any) -> Tensor:
        return sigmoid_loss(anchors[which], columns, targets=targets[which], ignore=ignore, **numbers)

    if same is None:
        return loss(slice(None), None)
    row_ids, column_ids, fits = same.ids()
    # Both questions make a GPU wait for its queue; a mask for every row would cost a byte a logit instead.
    if fits.all():
        # Most batches have no duplicates, and comparing ids is one more pass over the logits.
        alone = torch.bincount(column_ids, minlength=same.texts + 1)[row_ids].sum() == (targets >= 0).sum()
        return loss(slice(None), None if alone else (row_ids, column_ids))
    by_ids, by_mask = fits.nonzero()[:, 0], (~fits).nonzero()[:, 0]
    of_ids = loss(by_ids, (row_ids[by_ids], column_ids)) * len(by_ids)
    return (of_ids + loss(by_mask, same.mask(by_mask)) * len(by_mask)) / len(anchors)
