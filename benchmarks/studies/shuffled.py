"""ListMLE on shuffled lists, ablation (c) in Table 3 of the ranking-sentences paper. In recipes, name the loss by its
import path, benchmarks.studies.shuffled.ShuffledListMLELoss."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from datasets import Dataset

from benchmarks.studies.jobs import LISTS, ListMLELoss

SEED = 42


def read_shuffled(*arguments: Any) -> Any:
    """Read lists as LISTS does, and shuffle each list, including its first sentence."""
    dataset, counts = LISTS.read(*arguments)
    generator = random.Random(SEED)
    lists = [list(sentences) for sentences in dataset["sentences"]]
    for sentences in lists:
        generator.shuffle(sentences)
    return Dataset.from_dict({"sentences": lists}), counts


class ShuffledListMLELoss(ListMLELoss):
    """ListMLELoss that trains on shuffled lists."""

    reads = replace(LISTS, reader=f"{__name__}:read_shuffled")
