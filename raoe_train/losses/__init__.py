"""sentence-transformers loss modules over raoe_kernels' losses.

For ``raoe_train.Trainer``, or ``SentenceTransformerTrainer`` with the collator that a loss ``reads``. A batch can be
encoded piece by piece (``mini_batch_size``) and compared over all processes (``gather_across_devices``): both give the
gradient of the plain single-process batch. Recipes name a loss by its class, or by the import path of your own subclass
of ``Loss``.

``ByLength`` around any loss, sentence-transformers' too, encodes its batches by length, without most of their padding.

``gather_across_devices`` is for batches of one size in all processes, as the trainer's are; others are an error of the
collective or worse (gloo ends the process that has fewer rows). Under FSDP, which gathers layers in every forward,
processes must also have as many mini-batches as each other; by length they have.

Losses of pairs take ``{"score": (B,), "label": (B,)}`` of ``raoe_train.ScoreLabelCollator``, a (B, 2) tensor of rows
``[label, score]`` or, where no NLI label is needed, (B,) scores. ``reads`` names what the others take.
"""

from raoe_train.losses.base import CachedLoss, Loss
from raoe_train.losses.by_length import ByLength
from raoe_train.losses.distillation import (
    ListMLELoss,
    RankDistillationLoss,
    SimilarityDistillationLoss,
)
from raoe_train.losses.in_batch import GISTLoss, SigmoidLoss
from raoe_train.losses.infonce import AnglEContrastiveLoss, InfoNCELoss
from raoe_train.losses.library import (
    ContrastiveLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
    OnlineContrastiveLoss,
    SoftmaxLoss,
    TripletLoss,
)
from raoe_train.losses.pairs import AnglELoss, CoSENTLoss, PairLoss, PearsonLoss
from raoe_train.losses.raoe import GatedAngularLoss, RankMarginLoss, RAOELoss

__all__ = [
    "AnglEContrastiveLoss",
    "AnglELoss",
    "ByLength",
    "CachedLoss",
    "CoSENTLoss",
    "ContrastiveLoss",
    "CosineSimilarityLoss",
    "GISTLoss",
    "GatedAngularLoss",
    "InfoNCELoss",
    "ListMLELoss",
    "Loss",
    "MultipleNegativesRankingLoss",
    "OnlineContrastiveLoss",
    "PairLoss",
    "PearsonLoss",
    "RAOELoss",
    "RankDistillationLoss",
    "RankMarginLoss",
    "SigmoidLoss",
    "SimilarityDistillationLoss",
    "SoftmaxLoss",
    "TripletLoss",
]
