"""Keep is a regularizer that keeps embeddings close to their values before training."""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from raoe_train.config import NonNegativeFloat, convert
from raoe_train.data.columns import NAMES


class Keep:
    """Regularizer for any loss: the mean of 1 - cos(embedding, embedding before training) over the distinct texts in a
    batch. With several processes, each process averages over its own batch.

    The regularizer is the less-forget constraint of Hou et al. (2019, Eq. 6), with the encoder before training as the
    old model. Results: docs/adapt.md.

    Args:
        model: the encoder before training, which is copied and frozen. The copy encodes every batch without dropout, so
            a step takes a third longer than without the regularizer, and the weights are in memory twice.
        weight: the regularizer's weight, at least 0.
    """

    def __init__(self, model: Any, weight: float) -> None:
        self.weight: float = convert("keep", weight, NonNegativeFloat)
        self.start = copy.deepcopy(model).requires_grad_(False).eval()

    def __call__(self, now: Tensor, before: Tensor) -> Tensor:
        """Return weight x regularizer for the current embeddings [texts, D] and the embeddings before training."""
        # in bfloat16, rounding errors of cosines near 1 are as large as the changes that training makes
        with torch.autocast(now.device.type, enabled=False):
            wide = torch.promote_types(now.dtype, torch.float32)
            return self.weight * (1 - functional.cosine_similarity(now.to(wide), before.to(wide))).mean()


def weight_for(datasets: Any, keep: float | Literal["auto"]) -> float:
    """Return the regularizer's weight `keep` as a number. The value "auto" means 0.3 for queries and passages, and for
    scores with only two values, such as two classes. Otherwise, "auto" means 0. For scores with more values, averaging
    the encoder's weights from before and after training works as well as the regularizer on other texts, and better
    than the regularizer on the target data (docs/adapt.md).
    """
    if keep != "auto":
        return keep
    all_datasets = [*datasets.values()] if isinstance(datasets, Mapping) else [datasets]
    if any(not hasattr(dataset, "__len__") for dataset in all_datasets):
        raise ValueError('keep "auto" needs datasets of known length: set keep to a number, such as 1')
    scores = [{*dataset["score"][:]} for dataset in all_datasets if "score" in dataset.column_names]
    has_queries = not scores and any({*NAMES["anchor"]} & {*dataset.column_names} for dataset in all_datasets)
    if not has_queries and max(map(len, scores), default=0) != 2:
        return 0.0
    reason = "the data are queries and passages" if has_queries else "the scores have only two values"
    print(f"keep is 0.3, because {reason}")
    return 0.3
