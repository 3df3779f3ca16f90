"""Loss modules for sentence-transformers, built on the loss functions in raoe_kernels.

Use a loss with ``raoe_train.Trainer``, or with ``SentenceTransformerTrainer`` and the collator ``loss.reads.collator``.
With ``mini_batch_size``, a loss encodes its batch in mini-batches. With ``gather_across_devices``, a loss compares the
texts of all processes. With either option, the gradient is the same as when one process encodes the whole batch at
once. In a recipe, set ``loss`` to the class name of a loss or, for your own subclass of ``Loss``, to its import path.

``ByLength`` wraps a loss from raoe_train or sentence-transformers, and encodes batches with little or no padding.

``gather_across_devices`` requires batches of equal size in all processes, which the trainer ensures. If the sizes
differ, the all-gather fails (with gloo, the process with fewer rows crashes). FSDP gathers weights in each forward
pass, so all processes must also encode the same number of mini-batches, which ``ByLength`` ensures.

Pair losses accept three kinds of labels: ``{"score": (B,), "label": (B,)}`` from ``raoe_train.ScoreLabelCollator``, a
(B, 2) tensor of rows ``[label, score]``, or (B,) scores if the loss needs no NLI label. For other losses, see
collators.py.
"""

from raoe_train.losses.base import CachedLoss, Loss
from raoe_train.losses.by_length import ByLength
from raoe_train.losses.gist import GISTLoss
from raoe_train.losses.infonce import AnglEContrastiveLoss, InfoNCELoss
from raoe_train.losses.library import (
    AutoLoss,
    ContrastiveLoss,
    CosineSimilarityLoss,
    OnlineContrastiveLoss,
    SoftmaxLoss,
    TripletLoss,
)
from raoe_train.losses.listmle import ListMLELoss
from raoe_train.losses.pairs import AnglELoss, CoSENTLoss, PairLoss, PearsonLoss
from raoe_train.losses.raoe import GatedAngularLoss, RankMarginLoss, RAOELoss
from raoe_train.losses.sigmoid import SigmoidLoss

__all__ = ["AnglEContrastiveLoss", "AnglELoss", "AutoLoss", "ByLength", "CachedLoss", "CoSENTLoss", "ContrastiveLoss",
           "CosineSimilarityLoss", "GISTLoss", "GatedAngularLoss", "InfoNCELoss", "ListMLELoss", "Loss",
           "OnlineContrastiveLoss", "PairLoss", "PearsonLoss", "RAOELoss", "RankMarginLoss",
           "SigmoidLoss", "SoftmaxLoss", "TripletLoss"]  # fmt: skip
