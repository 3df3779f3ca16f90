"""Training: the trainer, its data, its callbacks, and evaluation before and after training."""

from raoe_train.training.callbacks import LogFile, LogLines
from raoe_train.training.trainer import Trainer
from raoe_train.training.training_data import PremiseBatchSampler

__all__ = ["LogFile", "LogLines", "PremiseBatchSampler", "Trainer"]
