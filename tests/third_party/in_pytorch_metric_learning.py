"""pytorch-metric-learning's NTXentLoss and NPairsLoss, over our info_nce_loss; with another distance, or a reducer that
is not the mean over pairs or over anchors, they stay theirs."""

from __future__ import annotations

from typing import Any

import pytorch_metric_learning.losses as theirs
import torch
from pytorch_metric_learning.reducers import PerAnchorReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as pairs_of

from raoe_kernels import info_nce_loss

NTXent, NPairs = theirs.NTXentLoss, theirs.NPairsLoss


class NTXentLoss(torch.nn.Module):
    """Each pair of one label is to be found among the anchor's pairs of other labels."""

    def __init__(self, temperature: float = 0.07, reducer: Any = None) -> None:
        super().__init__()
        self.temperature, self.reducer = temperature, reducer

    def forward(self, embeddings: Any, labels: Any, ref_emb: Any = None, ref_labels: Any = None) -> Any:
        columns, own = (embeddings, labels) if ref_emb is None else (ref_emb, ref_labels)
        anchors, positives, *_ = pairs_of.get_all_pairs_indices(labels, ref_labels)
        differs = labels[:, None] != own
        if not len(anchors) or not differs.any():
            return embeddings.sum() * 0
        ignore = ~differs[anchors]
        ignore[torch.arange(len(anchors)), positives] = False

        def mean(rows: Any) -> Any:
            return info_nce_loss(
                embeddings[anchors[rows]], columns, targets=positives[rows], ignore=ignore[rows],
                scale=1 / self.temperature,
            )  # fmt: skip

        each = [slice(None)] if self.reducer is None else [anchors == anchor for anchor in anchors.unique()]
        return torch.stack([mean(rows) for rows in each]).mean().to(embeddings.dtype)


class NPairsLoss(torch.nn.Module):
    """One pair a label, each to be found among the others' second ones."""

    def forward(self, embeddings: Any, labels: Any) -> Any:
        anchors, positives = pairs_of.convert_to_pos_pairs_with_unique_labels(None, labels)
        if not len(anchors):
            return embeddings.sum() * 0
        return info_nce_loss(embeddings[anchors], embeddings[positives], scale=1).to(embeddings.dtype)


def ntxent(temperature: float = 0.07, **others: Any) -> Any:
    ours = set(others) <= {"reducer"} and isinstance(others.get("reducer"), (PerAnchorReducer, type(None)))
    return NTXentLoss(temperature, **others) if ours else NTXent(temperature=temperature, **others)


theirs.NTXentLoss = ntxent
theirs.NPairsLoss = lambda **others: NPairs(**others) if others else NPairsLoss()
