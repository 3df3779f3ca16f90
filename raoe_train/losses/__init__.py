"""sentence-transformers loss modules over raoe_kernels' pairwise losses.

Each is used with ``SentenceTransformerTrainer`` as sentence-transformers' own losses are. They see three
numbers a
pair: the cosine that the encoder gives it, its score and, for the angular part, its NLI label. So a batch can
be encoded piece by piece (``mini_batch_size``) and ranked over all processes (``gather_across_devices``)
exactly: both give the gradient of the plain single-process batch.

Labels come as ``{"score": (B,), "label": (B,)}`` from ``raoe_train.ScoreLabelCollator``, as a (B, 2) tensor
whose rows are ``[label, score]``, or, where no NLI label is needed, as a (B,) tensor of scores.
"""

from raoe_train.losses.cosent import AnglELoss, CoSENTLoss
from raoe_train.losses.raoe import GatedAngularLoss, RankMarginLoss, RAOELoss

__all__ = ["AnglELoss", "CoSENTLoss", "GatedAngularLoss", "RAOELoss", "RankMarginLoss"]
