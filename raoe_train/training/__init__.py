"""Training: the trainer, what it reads, and what it measures."""

from raoe_train.training.premises import PremiseBatchSampler
from raoe_train.training.trainer import Trainer

__all__ = ["PremiseBatchSampler", "Trainer"]
