"""Read rows from data sources, and count malformed and dropped rows. A source is a file, the built-in corpus, a dataset
on a hub, a Dataset, a DataFrame or a pool of sources."""

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raoe_train.data.columns import NAMES, Columns, RowProblem, Rows
from raoe_train.data.files import batch_rows, data_kind, known_kind, read_rows, text_lines
from raoe_train.settings import Data

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)
BATCH = 4096  # number of rows to hold as Python objects at a time
LARGE = 200_000_000  # maximum size of a table in memory, in bytes; larger tables are stored in files
BUILTIN = {n: Path(__file__).with_name(f"{n}.jsonl.gz") for n in ("builtin", "builtin-nli")}
"""The built-in corpus, which tests/data/builtin_corpus.py writes: scored pairs, and NLI pairs."""
Mapped = Mapping[str, str | None]  # {raoe's column: column of a source, or None to ignore it}
Counts = dict[str, Any]
"""{"read": number of rows in the selected splits, "kept": number of rows, "dropped": {reason: number of rows},
"unread": names of columns that were not read, if any}. "read" is "kept" plus the sum of "dropped"."""
Table = tuple["Dataset", Counts]


def existing_file(name: str | os.PathLike[str]) -> Path:
    """Return the path of a data file. Raise FileNotFoundError if the path does not exist, and ValueError if it is not a
    data file."""
    path = Path(name).expanduser()
    if not path.exists():
        advice = "for a dataset on a hub, write hub:OWNER/NAME#SPLIT"
        raise FileNotFoundError(f"no such file: {str(path)!r} ({advice})")
    if is_benchmark_folder(path):
        advice = f"evaluate on it with --tasks retrieval:{path} or --data.dev {path}; for training, write its judged "
        advice += 'pairs to a .jsonl file, with a line {"query": TEXT, "pos": [TEXT, …]} for each query'
        raise ValueError(f"{str(path)!r} is a folder in BEIR's layout: {advice}")
    if path.is_dir():
        advice = "if it is a saved Dataset, convert it with Dataset.to_parquet()"
        raise ValueError(f"{str(path)!r} is a folder, not a data file: {advice}")
    if not path.is_file():
        raise ValueError(f"{path} is a pipe or a device, which can be read only once: use a file")
    known_kind(path)
    return path


def is_benchmark_folder(name: str | os.PathLike[str]) -> bool:
    """Return whether `name`, with or without #SPLIT, is a folder in BEIR's layout."""
    folder = Path(str(name).partition("#")[0]).expanduser()
    return any((folder / f"corpus.jsonl{suffix}").is_file() for suffix in ("", ".gz"))


def is_file(name: str | os.PathLike[str]) -> bool:
    """Return whether a source is a file. A name counts as a file if it exists as a path, or if it contains a data
    suffix, a `#` or a path separator. Names of the built-in corpus and names with the prefix hub: are not files."""
    if isinstance(name, os.PathLike):
        return True
    if name.startswith("hub:") or is_builtin(name):
        return False
    has_mark = bool({os.sep, os.altsep, "#"} & {*name})
    return has_mark or os.path.exists(name) or data_kind(name) is not None


def is_builtin(name: Any) -> bool:
    return isinstance(name, str) and name.partition("#")[0] in BUILTIN


def file_and_split(name: str | os.PathLike[str]) -> tuple[Path, str]:
    """Split the name of a data file into (path, split or ""). For errors, see existing_file."""
    text = os.fspath(name)  # a # may be part of the file's name
    base, _, split = (text, "", "") if os.path.exists(text) else text.partition("#")
    return existing_file(base), split


def pool(name: str | os.PathLike[str]) -> list[str]:
    """Split a pool SOURCE+SOURCE into its sources. If the name is not a pool, return [name]."""
    text = os.fspath(name)
    if not text:
        raise ValueError("the name of a data source is empty: use FILE, FILE#SPLIT or hub:OWNER/NAME#SPLIT")
    if any("+" in file and os.path.exists(file) for file in (text, text.partition("#")[0])):
        return [text]
    parts = text.split("+")
    for part in parts:
        if not (data_kind(part.partition("#")[0]) or part.startswith("hub:") or is_builtin(part)):
            return [text]
    return parts


def _open(name: Any, split_column: str) -> Rows:
    """Return the rows of a source, which is a name, a Dataset or a DataFrame. An unknown split raises an error only
    when rows are read."""
    if not isinstance(name, (str, os.PathLike)):
        return _dataset_rows(f"{type(name).__name__}, row", name)
    if len(parts := pool(name)) > 1:
        return itertools.chain.from_iterable([_open(part, split_column) for part in parts])
    base, _, split = str(name).partition("#")
    if is_file(name):
        path, split = file_and_split(name)
        rows = read_rows(path)
    elif base in BUILTIN:
        rows = read_rows(BUILTIN[base], f"{name}, row")
    else:
        return _hub_rows(f"{name}, row", base.removeprefix("hub:"), split)
    return _of_split(base, rows, "split" if is_builtin(name) else split_column, split) if split else rows


class Source:
    """A source of rows that can be read only once and that counts dropped rows by reason. For `columns` and `on_error`,
    see read_pairs."""

    def __init__(self, source: Any, columns: Any = None, on_error: str = "raise") -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        has_our_names = is_builtin(source) and len(pool(source)) == 1
        self.columns = Columns(None if has_our_names else columns)
        split_column = self.columns.mapping.get("split") or "split"
        self.rows = source if isinstance(source, Iterator) else _open(source, split_column)
        is_name = isinstance(source, (str, os.PathLike))
        self.name = str(source) if is_name else type(source).__name__
        self.on_error, self.dropped, self._examples = on_error, Counter[str](), list[str]()
        self.place = ""  # of the current row, such as "a.tsv, line 2"

    def parse(self, parse: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        """Yield parse(row) for each usable row. For an unusable row, `parse` raises RowProblem. If the row is malformed
        and on_error is not "skip", raise ValueError with the file and the line."""
        for place, row in self.rows:
            self.place = place
            try:
                if isinstance(row, RowProblem):
                    raise row
                result = parse(row)
            except RowProblem as problem:
                message = f"{place}: {problem}"
                if problem.malformed and self.on_error == "raise":
                    raise ValueError(message) from None
                self.dropped[problem.reason] += 1
                if len(self._examples) < 3:
                    self._examples.append(f"\n  {message}")
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            else:
                yield result

    def counts(self, kept: int, noun: str, advice: str = "") -> Counts:
        """Return the counts after reading. Raise ValueError with `advice` if no row was kept."""
        dropped = {reason: rows for reason, rows in self.dropped.items() if rows}
        counts = {"read": kept + sum(dropped.values()), "kept": kept, "dropped": dropped}
        if not kept:
            reasons = ", ".join(f"{reason} ({rows})" for reason, rows in dropped.items())
            reasons = (reasons or "there are no rows") + advice + "".join(self._examples)
            raise ValueError(f"{self.name}: no usable {noun} in {counts['read']} rows: {reasons}")
        unread = self.columns.unread()
        return counts | ({"unread": unread} if unread else {})

    def table(self, parse: Callable[[dict[str, Any]], dict[str, Any]], noun: str) -> Table:
        """Parse all rows. Return (table, counts). `noun` is the word for a row in messages, such as "pair"."""
        table = to_table(self.parse(parse))
        counts = self.counts(len(table), noun)
        if dropped := counts["dropped"]:
            rows, read = sum(dropped.values()), counts["read"]
            logger.warning("%s: %d of %d rows were left out: %s", self.name, rows, read, dropped)
        return table, counts

    def first_columns(self) -> list[str]:
        """Return the columns of the first row. With on_error "skip", use the first row that can be read."""
        for columns in self.parse(list):
            return columns
        self.counts(0, "row")  # raises ValueError
        return []


def to_table(rows: Iterable[dict[str, Any]], types: Mapping[str, str] | None = None) -> "Dataset":
    """Convert rows with the same columns to a table. A table of more than LARGE bytes is stored in a temporary file.
    `types` is {column: name of a pyarrow type}. By default, the first BATCH values of a column determine its type."""
    import pyarrow
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint, get_temporary_cache_files_directory
    from datasets.table import InMemoryTable, MemoryMappedTable

    rows, batches, schema, size, path = iter(rows), [], pyarrow.schema(types or {}), 0, ""
    while part := list(itertools.islice(rows, BATCH)):
        columns = {name: [row[name] for row in part] for name in part[0]}
        batches.append(pyarrow.RecordBatch.from_pydict(columns, schema or None))
        schema, size = batches[0].schema, size + batches[-1].nbytes
        if size > LARGE:
            if not path:
                path = os.path.join(get_temporary_cache_files_directory(), generate_random_fingerprint())
                writer = pyarrow.ipc.new_stream(path, schema)
            writer.write_table(pyarrow.Table.from_batches(batches))
            batches.clear()
    if path:
        writer.close()
    table = MemoryMappedTable.from_file(path) if path else InMemoryTable(pyarrow.Table.from_batches(batches, schema))
    # by default, the package datasets copies and hashes the table
    return Dataset(table, fingerprint=generate_random_fingerprint())


def row_values(table: Any, *names: str) -> Iterator[Any]:
    """Yield the values of a table, row by row, in the columns `names` or in all columns."""
    for part in table.select_columns([*names] or table.column_names).with_format("arrow").iter(BATCH):
        yield from zip(*(column.to_pylist() for column in part.columns), strict=True)


class Texts:
    """Iterable over all sentences in dataset columns (texts or lists of texts). It can be read repeatedly."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = dict(datasets)

    def __iter__(self) -> Iterator[str]:
        for dataset in self.datasets.values():
            for name in dataset.column_names:
                if name not in ("score", "label"):
                    for (value,) in row_values(dataset, name):
                        yield from [value] if isinstance(value, str) else value or ()


def roles_in(name: Any, mapping: Mapped) -> set[str]:
    """Return raoe's names (see NAMES) that match the columns of a source's first row."""
    source = Source(name, mapping, "skip")
    present, mapped = {*source.first_columns()}, source.columns.mapping
    return {role for role, names in NAMES.items() if present & {*([mapped[role]] if role in mapped else names)}}


def columns_in(name: Any, mapping: Mapped) -> dict[str, str | None]:
    """Return `mapping` without columns that a source's first row lacks. These columns belong to other files."""
    present = {None, *(Source(name, on_error="skip").first_columns() if mapping else ())}
    return {key: column for key, column in Columns(mapping).mapping.items() if column in present}


def read_sentences(name: str, columns: Mapped | None = None) -> "Dataset":
    """Read a source's sentences in order, into a column `sentence`. Blank lines of a .txt file are kept, so that
    row i is line i + 1."""

    def rows() -> Iterator[dict[str, str]]:
        for place, sentence in each_sentence(name, columns):
            if isinstance(sentence, RowProblem):
                raise ValueError(f"{place}: {sentence}")
            yield {"sentence": sentence}

    table = to_table(rows())
    if not len(table):
        raise ValueError(f"{name} has no sentences")
    return table


def each_sentence(name: str, columns: Mapped | None = None) -> Iterator[tuple[str, str | RowProblem]]:
    """Yield (location, sentence) for each row of a source, or (location, problem) for a malformed row."""
    source = Source(name, columns)
    is_text = is_file(name) and name.lower().removesuffix(".gz").endswith(".txt")
    if is_text and "sentence" not in (columns or {}):
        lines, problem = text_lines(existing_file(name)), RowProblem("not UTF-8")
        source.rows = ((f"{name}, line {n}", problem if line is None else {"text": line}) for n, line in lines)
    for place, row in source.rows:
        if isinstance(row, RowProblem):
            yield place, row
            continue
        try:
            column = source.columns.find(row, ("sentence",))["sentence"]
        except RowProblem as error:
            raise ValueError(f"{place}: {error}") from None
        text = row[column]
        yield place, text if isinstance(text, str) else RowProblem(f"{column} is {text!r}, not a string")


def _of_split(name: str, rows: Rows, column: str, split: str) -> Rows:
    splits = Counter[str]()
    for place, row in rows:
        if isinstance(row, RowProblem):  # the row's split is unknown
            yield place, row
            continue
        if column not in row:
            problem = f"#{split} selects rows by the column {column!r}, which is missing"
            names = ", ".join(map(repr, row))
            raise ValueError(f"{place}: {problem}; columns: {names}")
        splits[str(row[column])] += 1
        if str(row[column]) == split:
            yield place, row
    if split not in splits:
        listing = ", ".join(f"{word} ({count})" for word, count in splits.items()) or "none"
        raise ValueError(f"{name}: no split {split!r}; splits: {listing}")


def _dataset_rows(where: str, table: Any) -> Rows:
    from datasets import Dataset

    table = from_frames(table)
    if not isinstance(table, Dataset):
        kinds = "a file, the name of a dataset on a hub, a Dataset or a DataFrame"
        raise ValueError(f"a data source must be {kinds}, got {table!r:.100}")
    return batch_rows(where, table.iter(1000), table.features)


def from_frames(data: Any) -> Any:
    """Convert a DataFrame, or each DataFrame in a mapping, to a Dataset. Return other data unchanged."""
    from datasets import Dataset
    from pandas import DataFrame

    if isinstance(data, Mapping):
        return type(data)({name: from_frames(each) for name, each in data.items()})  # type: ignore[call-arg]
    return Dataset.from_pandas(data, preserve_index=False) if isinstance(data, DataFrame) else data


def _hub_rows(where: str, name: str, split: str) -> Rows:
    from datasets import DatasetDict, load_dataset

    path, _, config = name.partition(":")
    dataset = load_dataset(path, config or None)
    if isinstance(dataset, DatasetDict):
        if not split and len(dataset) == 1:
            split = next(iter(dataset))
        if split not in dataset:
            splits = ", ".join(map(str, dataset))
            raise ValueError(f"{name} has the splits {splits}: choose one with hub:{name}#SPLIT")
        dataset = dataset[split]
    yield from _dataset_rows(where, dataset)


def labels_of(source: str, data: Data) -> dict[str, int | None] | None:
    """Return the label map for one source in the section `data` of the settings. The label map is `data.labels`, or its
    entry for the file's name (such as "sick" or "sick.tsv.gz"). Raise ValueError if an entry matches no source."""
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
        raise ValueError(f"data.labels must be the same for all files in the pool {source}")
    return maps[0]


def _names_of(source: str) -> list[str]:
    """Return the names by which data.labels can refer to a source: "sick", "sick.tsv.gz", or the name as written."""
    base = source.partition("#")[0]
    return [Path(base).name.split(".")[0], Path(base).name, Path(source).name, base, source]
