"""Rows as Arrow tables in memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 4096  # rows that are Python objects at a time


def to_table(rows: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None) -> Dataset:
    """Rows with the same columns as a table in memory.

    Never more than BATCH rows are Python objects at a time; a column's type is that of its first BATCH values. `names`
    are the columns to keep, by default all.
    """
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint
    from datasets.table import InMemoryTable

    batches = _batches(rows, names)
    first = next(batches, pyarrow.RecordBatch.from_pydict({}))
    table = InMemoryTable(pyarrow.Table.from_batches(itertools.chain([first], batches)))
    return Dataset(table, fingerprint=generate_random_fingerprint())  # its own would be made of a copy


def _batches(rows: Iterable[Mapping[str, Any]], names: Sequence[str] | None) -> Iterator[Any]:
    import pyarrow

    schema = None
    for some in runs(rows, BATCH):
        batch = pyarrow.RecordBatch.from_pydict(
            {name: [row[name] for row in some] for name in names or some[0]}, schema
        )
        schema = batch.schema
        yield batch


def drawn(table: Dataset, most: int | None, seed: int) -> Dataset:
    """At most so many of the rows, drawn with `seed`, in their order."""
    if most is None or most >= len(table):
        return table
    return table.select(sorted(random.Random(seed).sample(range(len(table)), most)))


def runs(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` items, the last shorter."""
    iterator = iter(items)
    while run := list(itertools.islice(iterator, size)):
        yield run


class Texts:
    """All sentences of datasets, to be iterated as often as one likes: by dataset, by column, row by row; of a column
    of lists each list's, one after another."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = dict(datasets)

    def __iter__(self) -> Iterator[str]:
        for column in self.columns():
            for value in column.to_pylist():
                yield from [value] if isinstance(value, str) else value

    def columns(self) -> Iterator[Any]:
        """The columns, BATCH rows of one at a time, as pyarrow.ChunkedArray."""
        for dataset in self.datasets.values():
            for name in dataset.column_names:
                if name in ("score", "label"):
                    continue
                for table in dataset.select_columns([name]).with_format("arrow").iter(BATCH):
                    yield table[name]
