"""Training: the trainer, what it reads, and what it measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raoe_train.artifacts.lazy import exports

if TYPE_CHECKING:
    from raoe_train.training.log_table import LogTable
    from raoe_train.training.premises import PremiseBatchSampler
    from raoe_train.training.run_directory import log_writer
    from raoe_train.training.trainer import Trainer

__all__ = ["LogTable", "PremiseBatchSampler", "Trainer", "log_writer"]
HOMES = {
    "log_table": ("LogTable",),
    "premises": ("PremiseBatchSampler",),
    "run_directory": ("log_writer",),
    "trainer": ("Trainer",),
}
__getattr__ = exports(__name__, HOMES)
