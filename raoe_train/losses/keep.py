"""What holds an encoder to what it knew: the embeddings that it gave before training."""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from raoe_train.losses.base import from_zero


def weight_for(datasets: Any, keep: float | Literal["auto"]) -> float:
    """`keep`; in place of "auto", with a line printed, 1, and 0.3 where the scores of the dataset, or of all datasets
    by name, have two values: to tell classes apart texts have to move further (docs/adapt.md)."""
    if keep != "auto":
        return keep
    every = [*datasets.values()] if isinstance(datasets, Mapping) else [datasets]
    if any(not hasattr(dataset, "__len__") for dataset in every):
        raise ValueError('keep "auto" reads the scores of datasets of a known length: give a number, such as 1')
    scores = [{*dataset["score"][:]} for dataset in every if "score" in dataset.column_names]
    weight = 0.3 if scores and max(map(len, scores)) == 2 else 1.0
    print(f"keep {weight:g}")
    return weight


class Keep:
    """A term beside any loss: the mean over a batch's texts of 1 - cos(embedding, the same text's before training).

    The less-forget constraint of Hou et al. (2019, equation 6), with the encoder's own start for the old model;
    docs/adapt.md has what it brings.

    Args:
        model: the encoder as it is now, of which a frozen copy is made. It reads every batch without dropout: a third
            of a step more, and the weights twice in memory.
        weight: of the term, from 0.
    """

    def __init__(self, model: Any, weight: float) -> None:
        from_zero(keep=weight)
        self.weight = weight
        self.start = copy.deepcopy(model).requires_grad_(False).eval()

    def __call__(self, now: Tensor, before: Tensor) -> Tensor:
        """The term, (), of the (texts, D) embeddings of the same texts now and before."""
        # bfloat16 rounds a cosine near 1 by as much as training moves it
        with torch.autocast(now.device.type, enabled=False):
            wide = torch.promote_types(now.dtype, torch.float32)
            return self.weight * (1 - functional.cosine_similarity(now.to(wide), before.to(wide))).mean()
