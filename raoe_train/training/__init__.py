"""Training: the trainer, what it reads, and what it measures."""

from raoe_train.training.trainer import Trainer
from raoe_train.training.training_data import PremiseBatchSampler

__all__ = ["PremiseBatchSampler", "Trainer"]
