"""sentence-transformers loss modules over raoe_kernels' losses.

Each is used with ``raoe_train.Trainer``, or as sentence-transformers' own with ``SentenceTransformerTrainer`` and the
collator that it ``reads``. A batch can be encoded piece by piece (``mini_batch_size``) and compared over all processes
(``gather_across_devices``) exactly: both give the gradient of the plain single-process batch. ``register`` makes a loss
of your own one that recipes name, by its signature.

``ByLength`` is around any loss, theirs too: its batches are encoded by length, without most of their padding.

``gather_across_devices=True`` is for batches of the same size in all processes, as the trainer's are; it does not look.
Others are an error of the collective or worse (gloo ends the process that has fewer rows; with
TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares shapes and says which differ). ``"uneven"`` is for a loop of your own with
last batches that differ: the processes, each with a row at least, first exchange their sizes, and a GPU waits for them.
Under FSDP, which gathers layers in every forward, processes must also have as many mini-batches as each other; by
length they have.

The losses of pairs see three numbers a pair: the cosine that the encoder gives it, its score and, for the angular part,
its NLI label. Labels come as ``{"score": (B,), "label": (B,)}`` from ``raoe_train.ScoreLabelCollator``, as a (B, 2)
tensor whose rows are ``[label, score]``, or, where no NLI label is needed, as a (B,) tensor of scores.

InfoNCELoss and AnglEContrastiveLoss see columns of texts, anchor, positive and hard negatives, and no labels.
ListMLELoss sees one column, the sentences of several lists, and how long each list is, from
``raoe_train.ListCollator``. SimilarityDistillationLoss and RankDistillationLoss see two columns and their texts, which
a teacher of theirs reads, from ``raoe_train.TextCollator``.
"""

from raoe_train.losses.angle_contrastive import AnglEContrastiveLoss
from raoe_train.losses.by_length import ByLength
from raoe_train.losses.cosent import AnglELoss, CoSENTLoss
from raoe_train.losses.distillation import RankDistillationLoss, SimilarityDistillationLoss
from raoe_train.losses.infonce import InfoNCELoss
from raoe_train.losses.listmle import ListMLELoss
from raoe_train.losses.raoe import GatedAngularLoss, RankMarginLoss, RAOELoss
from raoe_train.losses.registry import register

__all__ = [
    "AnglEContrastiveLoss",
    "AnglELoss",
    "ByLength",
    "CoSENTLoss",
    "GatedAngularLoss",
    "InfoNCELoss",
    "ListMLELoss",
    "RAOELoss",
    "RankDistillationLoss",
    "RankMarginLoss",
    "SimilarityDistillationLoss",
    "register",
]
