"""Rows as Arrow tables, which need not fit in memory: compact in memory, or in files that are memory-mapped and found
again by what they were made from."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raoe_train.artifacts.once import made_once
from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.writing import write_json

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 4096  # rows that are Python objects at a time
READING = 2  # to be raised where rows are read by other rules: what was kept is then made anew
ROWS, COUNTS = "rows.arrow", "counts.json"


def to_table(
    rows: Iterable[Mapping[str, Any]], path: Path | None = None, names: Sequence[str] | None = None
) -> Dataset:
    """Rows with the same columns as a table in memory, or in the file `path`, which is memory-mapped.

    Never more than BATCH rows are Python objects at a time; a column's type is that of its first BATCH values. `names`
    are the columns to keep, by default all.
    """
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint
    from datasets.table import InMemoryTable

    batches = _batches(rows, names)
    first = next(batches, pyarrow.RecordBatch.from_pydict({}))
    batches = itertools.chain([first], batches)
    if path is None:
        table = InMemoryTable(pyarrow.Table.from_batches(batches))
        return Dataset(table, fingerprint=generate_random_fingerprint())  # its own would be made of a copy
    # Python's file: its errors say what is full, or may not be written
    with open(path, "wb") as file, pyarrow.ipc.new_stream(file, first.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return Dataset.from_file(str(path))


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


def kept(
    cache: str | None, made_from: Mapping[str, Any] | None, make: Callable[[Path | None], tuple[Any, dict[str, Any]]]
) -> tuple[Any, dict[str, Any]]:
    """(dataset, counts) that `make` gives, from the directory `cache` where they were made from the same before.

    `made_from` is all that the rows depend on, as plain values; None of what cannot be found again.
    """
    if cache is None or made_from is None:
        return make(None)
    from datasets import Dataset

    def write(folder: Path) -> None:
        _, counts = make(folder / ROWS)
        write_json(folder / COUNTS, counts)

    key = digest({**made_from, "reading": READING})
    entry = made_once(Path(cache).expanduser() / f"rows-{key[:32]}", write)
    return Dataset.from_file(str(entry / ROWS)), json.loads((entry / COUNTS).read_text(encoding="utf-8"))


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
