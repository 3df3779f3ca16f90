"""Pearson's correlation of cosines and scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from raoe_train.losses.pair_losses import PairLoss
from raoe_train.losses.widths import OneSweep


class PearsonLoss(OneSweep, PairLoss):
    """1 - Pearson's correlation of the batch's cosines and scores (the loss of Pcc-tuning, Zhang and Li 2024).

    It is the same for scores times any positive number and plus any other, so that it needs neither their scale nor a
    temperature, and `scale` has no part in it. A batch whose scores are all equal teaches nothing.

    Args:
        model, scale, cached: see OneSweep and PairLoss.
    """

    cites = ("zhang2024pcctuning",)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        wide = torch.promote_types(similarity.dtype, torch.float32)
        ours, theirs = (each.to(wide) - each.to(wide).mean(-1, keepdim=True) for each in (similarity, score))
        # eps: where all cosines are nearly equal, their differences are rounding, and no direction to go into
        return 1 - functional.cosine_similarity(ours, theirs, dim=-1, eps=1e-4)
