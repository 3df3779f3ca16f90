"""A batch sampler for recipes: training.batch_sampler benchmarks.studies.premise.PremiseBatchSampler."""

from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler


class PremiseBatchSampler(DefaultBatchSampler):
    """A batch sampler in random order that keeps rows with the same first text together.

    An NLI premise occurs in three rows. If these rows are in one batch, ByLength encodes the premise
    only once, but the batch has more similar texts (docs/lab/speed.md).
    """

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, **others: Any) -> None:
        first = dataset.with_format("arrow")[:].column(0).combine_chunks().dictionary_encode()
        rows = _Grouped(torch.from_numpy(first.indices.to_numpy().copy()), others.get("generator"))
        super().__init__(rows, batch_size=batch_size, drop_last=drop_last, **others)


class _Grouped(torch.utils.data.Sampler[int]):
    """Sampler of row numbers: groups are in random order, and the rows of a group follow each other."""

    def __init__(self, group: torch.Tensor, generator: Any) -> None:
        self.group, self.generator = group.long(), generator

    def __len__(self) -> int:
        return len(self.group)

    def __iter__(self) -> Iterator[int]:
        place = torch.randperm(int(self.group.max()) + 1, generator=self.generator, device="cpu")
        yield from torch.argsort(place[self.group], stable=True).tolist()
