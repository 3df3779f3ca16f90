"""Loss modules for sentence-transformers on top of raoe_kernels' losses.

Use a loss with ``raoe_train.Trainer``, or with ``SentenceTransformerTrainer`` and the collator of the loss's ``reads``.
A batch can be encoded in mini-batches (``mini_batch_size``) and compared across processes (``gather_across_devices``).
In both cases, the gradient is that of the whole batch in one process. Recipes name a loss by its class, or by the
import path of your own subclass of ``Loss``.

``ByLength`` wraps any loss, also losses of sentence-transformers, and encodes batches without most of the padding.

``gather_across_devices`` needs batches of equal size in all processes, as the trainer makes them. Otherwise the
collective fails (gloo ends the process with fewer rows). FSDP gathers layers in every forward pass, so processes must
also have the same number of mini-batches, which ByLength ensures.

The labels of pair losses are ``{"score": (B,), "label": (B,)}`` from ``raoe_train.ScoreLabelCollator``, a (B, 2) tensor
of rows ``[label, score]`` or, if the loss needs no NLI label, (B,) scores. For other losses, see their ``reads``.
"""

from raoe_train.losses.base import CachedLoss, Loss
from raoe_train.losses.by_length import ByLength
from raoe_train.losses.distillation import ListMLELoss, RankDistillationLoss, SimilarityDistillationLoss
from raoe_train.losses.in_batch import GISTLoss, SigmoidLoss
from raoe_train.losses.infonce import AnglEContrastiveLoss, InfoNCELoss
from raoe_train.losses.library import (
    AutoLoss,
    ContrastiveLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
    OnlineContrastiveLoss,
    SoftmaxLoss,
    TripletLoss,
)
from raoe_train.losses.pairs import AnglELoss, CoSENTLoss, PairLoss, PearsonLoss
from raoe_train.losses.raoe import GatedAngularLoss, RankMarginLoss, RAOELoss

__all__ = ["AnglEContrastiveLoss", "AnglELoss", "AutoLoss", "ByLength", "CachedLoss", "CoSENTLoss", "ContrastiveLoss",
           "CosineSimilarityLoss", "GISTLoss", "GatedAngularLoss", "InfoNCELoss", "ListMLELoss", "Loss",
           "MultipleNegativesRankingLoss", "OnlineContrastiveLoss", "PairLoss", "PearsonLoss", "RAOELoss",
           "RankDistillationLoss", "RankMarginLoss", "SigmoidLoss", "SimilarityDistillationLoss", "SoftmaxLoss",
           "TripletLoss"]  # fmt: skip
