"""Arrow tables in memory, and the texts in tables."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 4096  # number of rows to hold as Python objects at a time


def to_table(rows: Iterable[dict[str, Any]], types: Mapping[str, str] | None = None) -> "Dataset":
    """Convert rows with the same columns to a table in memory. `types` is {column: name of a
    pyarrow type}. Without `types`, the first BATCH values of a column determine its type."""
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint
    from datasets.table import InMemoryTable

    rows, batches, schema = iter(rows), [], pyarrow.schema(types or {})
    while part := list(itertools.islice(rows, BATCH)):
        columns = {name: [row[name] for row in part] for name in part[0]}
        batches.append(pyarrow.RecordBatch.from_pydict(columns, schema or None))
        schema = batches[0].schema
    table = InMemoryTable(pyarrow.Table.from_batches(batches, schema))
    # by default, datasets copies and hashes the table
    return Dataset(table, fingerprint=generate_random_fingerprint())


class Texts:
    """All sentences in datasets whose columns hold texts or lists of texts, any number of times."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = dict(datasets)

    def __iter__(self) -> Iterator[str]:
        for dataset in self.datasets.values():
            for name in dataset.column_names:
                if name not in ("score", "label"):
                    for table in dataset.select_columns([name]).with_format("arrow").iter(BATCH):
                        for value in table[name].to_pylist():
                            yield from [value] if isinstance(value, str) else value or ()
