"""Batches that keep a premise's pairs together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler


class PremiseBatchSampler(DefaultBatchSampler):
    """Batches of rows in an order that is random but for rows with the same first text, which follow each other.

    An NLI premise stands with three hypotheses; in one batch raoe_train.losses.ByLength encodes it once. What a batch
    compares is then more alike, see docs/by-length.md. It is for batch_sampler of the training arguments.
    """

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, **others: Any) -> None:
        first = dataset.with_format("arrow")[:].column(0).combine_chunks().dictionary_encode()
        rows = _Grouped(torch.from_numpy(first.indices.to_numpy().copy()), others.get("generator"))
        super().__init__(rows, batch_size=batch_size, drop_last=drop_last, **others)


class _Grouped(torch.utils.data.Sampler[int]):
    """Row numbers, those of a group after each other, groups in random order."""

    def __init__(self, group: torch.Tensor, generator: Any) -> None:
        self.group, self.generator = group.long(), generator

    def __len__(self) -> int:
        return len(self.group)

    def __iter__(self) -> Iterator[int]:
        place = torch.randperm(int(self.group.max()) + 1, generator=self.generator)
        yield from torch.argsort(place[self.group], stable=True).tolist()
