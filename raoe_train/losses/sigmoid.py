"""SigLIP's sigmoid loss, whose scale and bias can be learned."""

import math
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import sigmoid_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.base import gather_rows
from raoe_train.losses.in_batch import Ids, InBatchLoss

SCALE_BOUNDS = (1.0, 100.0)  # bounds of a learned scale, as in CLIP


class SigmoidLoss(InBatchLoss):
    """Classify every (anchor, text) pair in the batch as positive or negative, with ``sigmoid_loss``.

    If no text occurs twice, the loss equals that of SigLIP (Zhai et al. 2023) and of open_clip's SigLipLoss.

    Args:
        model, scale, **contrastive: arguments of InBatchLoss.
        bias: offset added to scale x cosine. At -10, nearly all pairs are classified as negatives at first, which suits
            batches with one positive per anchor
        learn_scale: learn bias and scale, as the parameters `logit_bias` and `log_scale` (the logarithm of the scale,
            which stays between 1 and 100 as in CLIP). Set the learning rate of these parameters, for example with
            training.learning_rate_mapping {log_scale|logit_bias: 1e-3}
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
        super().__init__(model, scale, **contrastive)
        low, high = SCALE_BOUNDS
        if learn_scale and not low <= scale <= high:
            raise ValueError(f"with learn_scale, the scale must be from {low:g} to {high:g}, got {scale!r}")
        self.bias, self.learn_scale = bias, learn_scale
        if learn_scale:
            self.log_scale = nn.Parameter(torch.tensor(math.log(scale), device="cpu"))
            self.logit_bias = nn.Parameter(torch.tensor(float(bias), device="cpu"))

    @property
    def current_scale(self) -> float:
        return float(self._clamp_scale().detach().exp()) if self.learn_scale else self.scale

    def _clamp_scale(self) -> Tensor:
        self.log_scale.data.clamp_(*map(math.log, SCALE_BOUNDS))
        return self.log_scale

    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        columns, targets = torch.cat([*map(self.gather, embeddings[1:])]), self.targets(embeddings[0])
        rows = slice(None) if targets is None else targets
        ignore = None if ids is None else (ids[0][rows], ids[1])
        scale: Any = self.scale
        bias: Any = self.bias
        if self.learn_scale:
            # DistributedDataParallel averages only the encoder's gradients; the mean over gathered copies averages
            # the gradients of scale and bias
            scale = gather_rows(self._clamp_scale()[None]).mean(0).exp()
            bias = gather_rows(self.logit_bias[None]).mean(0)
        return sigmoid_loss(embeddings[0], columns, scale=scale, bias=bias, targets=targets, ignore=ignore)
