"""Sources of rows: a file, the built-in corpus, a dataset on a hub, or a pool of several sources."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raoe_train.data.columns import NAMES, Columns, RowProblem
from raoe_train.data.files import Row, class_labels, data_kind, existing_file, name_classes, read_rows

BUILTIN = {name: Path(__file__).with_name(f"{name}.jsonl.gz") for name in ("builtin", "builtin-nli")}
"""The built-in corpus (written by tests/data/builtin_corpus.py): scored pairs; premises with a hypothesis per label."""


@dataclass
class Source:
    """Rows to read, with their numbers: a whole source or one split. The rows can be iterated once."""

    name: str  # for messages
    unit: str  # unit of the row numbers: "line" or "row"
    columns: Columns  # finds raoe's columns among the columns of the source
    rows: Iterator[Row]
    line: int = 0  # line or row number (see `unit`) of the current row

    def __str__(self) -> str:
        return self.name

    def place(self) -> str:
        """Return the location of the current row, for messages."""
        return f"{self.name}, {self.unit} {self.line}"


def is_file(name: str | os.PathLike[str]) -> bool:
    """Whether a source is a file: it has no prefix hub:, and exists or has a data suffix, a `#` or a path separator."""
    if isinstance(name, os.PathLike):
        return True
    if name.startswith("hub:") or name.partition("#")[0] in BUILTIN:
        return False
    return os.path.exists(name) or data_kind(name) is not None or bool({os.sep, os.altsep, "#"} & {*name})


def pool(name: str | os.PathLike[str]) -> list[str]:
    """Split a pool SOURCE+SOURCE into its sources. For a name that is not a pool, return [name]."""
    text = os.fspath(name)
    if not text:
        raise ValueError("the name of a data source is empty: use FILE, FILE#SPLIT or a name on a hub")
    if any("+" in file and os.path.exists(file) for file in (text, text.partition("#")[0])):
        return [text]
    parts = text.split("+")
    bases = [part.partition("#")[0] for part in parts]
    return parts if all(data_kind(base) or base.startswith("hub:") or base in BUILTIN for base in bases) else [text]


def open_source(name: str | os.PathLike[str], mapping: Mapping[str, str | None] | None = None) -> Source:
    """Open a source: a name, a Dataset or a DataFrame. An unknown split raises an error only when rows are read."""
    if not isinstance(name, (str, os.PathLike)):
        return Source(type(name).__name__, "row", Columns(mapping), enumerate(_table_rows(name), 1))
    if len(parts := pool(name)) > 1:
        return join_sources(str(name), [open_source(part, mapping) for part in parts], Columns(mapping))
    base, _, split = str(name).partition("#")
    if is_file(name):
        path, split = file_and_split(name)
        unit = "row" if data_kind(path) == "parquet" else "line"
        source = Source(str(path), unit, Columns(mapping), read_rows(path))
    elif base in BUILTIN:
        source = Source(str(name), "row", Columns(), read_rows(BUILTIN[base]))
    else:
        rows = enumerate(_hub_rows(base.removeprefix("hub:"), split), 1)
        return Source(str(name), "row", Columns(mapping), rows)
    if split:
        source.rows = _split_rows(source, source.rows, split)
    return source


def has_column(name: str | os.PathLike[str], mapping: Mapping[str, str | None], *columns: str) -> bool:
    """Whether the first row of a source has at least one of `columns` (raoe's names, see NAMES)."""
    stream = open_source(name, mapping)
    fields = _first_row(stream)
    names: Any = {**NAMES, **{column: (name,) for column, name in stream.columns.mapping.items()}}
    return any(name in fields for column in columns for name in names[column])


def columns_in(name: str | os.PathLike[str], mapping: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return `mapping` without columns that the first row of a source lacks, such as those of another file."""
    fields = _first_row(open_source(name)) if mapping else {}
    return {key: column for key, column in Columns(mapping).mapping.items() if column is None or column in fields}


def _first_row(stream: Source) -> dict[str, Any]:
    return next((fields for _, fields in stream.rows if isinstance(fields, dict)), {})


def join_sources(name: str, sources: Sequence[Source], columns: Columns) -> Source:
    """Join sources into one source, with all rows in order. Messages name the original source of a row."""

    def rows() -> Iterator[Row]:
        for each in sources:
            for row in each.rows:
                source.name, source.unit = each.name, each.unit
                yield row
        source.name = name

    source = Source(name, "row", columns, rows())
    return source


def file_and_split(name: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return (path, split or "") of a source that is a file. FileNotFoundError or ValueError if it is no data file."""
    text = os.fspath(name)  # a # may be part of the file's name
    base, _, split = (text, "", "") if os.path.exists(text) else text.partition("#")
    return existing_file(base), split


def _split_rows(source: Source, rows: Iterator[Row], split: str) -> Iterator[Row]:
    column = source.columns.mapping.get("split") or NAMES["split"][0]
    splits: Counter[str] = Counter()
    for line, fields in rows:
        if isinstance(fields, RowProblem):  # its split is unknown: the caller handles the problem
            yield line, fields
            continue
        if column not in fields:
            names = ", ".join(map(repr, fields))
            place = f"{source.name}, {source.unit} {line}"
            raise ValueError(f"{place}: no column {column!r}, which #{split} needs; columns: {names}")
        splits[str(fields[column])] += 1
        if str(fields[column]) == split:
            yield line, fields
    if split not in splits:
        listing = ", ".join(f"{name} ({rows})" for name, rows in splits.items()) or "none"
        raise ValueError(f"{source.name}: no split {split!r}; splits: {listing}")


def _table_rows(table: Any) -> Iterator[dict[str, Any]]:
    from datasets import Dataset
    from pandas import DataFrame

    table = Dataset.from_pandas(table, preserve_index=False) if isinstance(table, DataFrame) else table
    if not isinstance(table, Dataset):
        raise ValueError(f"a data source must be a file, a name on a hub, a Dataset or a DataFrame, got {table!r:.100}")
    return _named_rows(table)


def _named_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    classes = class_labels(dataset.features)
    return (name_classes(row, classes) for row in dataset)


def _hub_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    from datasets import DatasetDict, load_dataset

    path, _, config = name.partition(":")
    dataset = load_dataset(path, config or None)
    if isinstance(dataset, DatasetDict):
        if not split and len(dataset) == 1:
            split = next(iter(dataset))
        if split not in dataset:
            raise ValueError(f"{name} has the splits {', '.join(map(str, dataset))}: choose one with hub:{name}#SPLIT")
        dataset = dataset[split]
    yield from _named_rows(dataset)


def labels_of(source: str, data: Any) -> dict[str, int | None] | None:
    """Return the label map of a section `data` for one of its sources: `labels`, or the entry of `labels` for the
    file's name ("sick" or "sick.tsv.gz"). ValueError for an entry that matches no source."""
    if not data.labels or not any(isinstance(entry, dict) for entry in data.labels.values()):
        return data.labels
    names = [_names_of(part) for each in (*data.train, *(data.dev or [])) for part in pool(each)]
    if unknown := {*data.labels} - {name for known in names for name in known}:
        sources = ", ".join(dict.fromkeys(known[1] for known in names))
        raise ValueError(f"data.labels has a key {min(unknown)!r}, which matches none of the sources: {sources}")
    maps = []
    for part in pool(source):
        maps.append(next((data.labels[name] for name in _names_of(part) if name in data.labels), None))
    if any(each != maps[0] for each in maps):
        raise ValueError(f"data.labels must be the same for all files of the pool {source}")
    return maps[0]


def _names_of(source: str) -> list[str]:
    """Return the names by which data.labels can refer to a source: "sick", "sick.tsv.gz", and the name as written."""
    base = source.partition("#")[0]
    return [Path(base).name.split(".")[0], Path(base).name, Path(source).name, base, source]
