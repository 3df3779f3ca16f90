"""InfoNCE with in-batch and hard negatives, without the matrix of logits."""

from raoe_kernels.contrastive.api import info_nce_loss
from raoe_kernels.contrastive.autograd import OP

__all__ = ["OP", "info_nce_loss"]
