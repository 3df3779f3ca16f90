"""The rows of sources as tables: one rule for what is malformed, what is left out, and what is counted."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from raoe_train.data.columns import RowProblem
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import to_table

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")
Parse = Callable[[dict[str, Any], Source], Parsed]
"""(a row's fields, its source) -> what to keep of it; RowProblem for a row that cannot be used."""
Reader = Callable[[str, Any], Any]
"""(the source's column, its value) -> what to keep of it; RowProblem for one that cannot be used."""
Counts = dict[str, Any]
"""{"read": rows of the splits asked for, "kept", "dropped": {reason: rows}}; read = kept + all dropped."""


class Tally:
    """What is left out of a source's rows, and why: `dropped` rows by reason, and the first of them for messages."""

    def __init__(self, on_error: str) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        self.on_error = on_error
        self.dropped: Counter[str] = Counter()
        self._first: list[str] = []

    def refuse(self, source: Source, problem: RowProblem) -> None:
        """Leave the source's row out; ValueError, with file and line, for a malformed one that is not to be skipped."""
        where = f"{source.place()}: {problem}"
        if problem.malformed and self.on_error == "raise":
            raise ValueError(where) from None
        self.dropped[problem.reason] += 1
        if len(self._first) < 3:
            self._first.append(f"\n  {where}")

    def counts(self, name: str, kept: int, noun: str, advice: str = "") -> Counts:
        """Of the source `name`, which was read to its end; ValueError, with `advice`, where nothing was kept."""
        dropped = {reason: rows for reason, rows in self.dropped.items() if rows}
        read = kept + self.dropped.total()
        if not kept:
            why = ", ".join(f"{rows} x {reason}" for reason, rows in dropped.items()) or "there are no rows"
            raise ValueError(f"{name}: no {noun} left of {read} rows: {why}{advice}{''.join(self._first)}")
        return {"read": read, "kept": kept, "dropped": dropped}


def each_kept(source: Source, parse: Parse[Parsed], tally: Tally) -> Iterator[Parsed]:
    """What `parse` makes of each row of a source; those that cannot be used go to `tally`."""
    for line, row in source.rows:
        source.line = line
        try:
            if isinstance(row, RowProblem):
                raise row
            parsed = parse(row, source)
        except RowProblem as problem:
            tally.refuse(source, problem)
        except ValueError as error:
            raise ValueError(f"{source.place()}: {error}") from None
        else:
            yield parsed


def by_column(readers: Mapping[str, Reader], require: Sequence[str] | None = None) -> Parse:
    """Of rows with our columns `require`, by default all of `readers`, and perhaps others of them: {ours: as read}."""
    must = tuple(readers if require is None else require)

    def parse(fields: dict[str, Any], source: Source) -> dict[str, Any]:
        found = source.columns.find(fields, must, readers)
        return {name: read(found[name], fields[found[name]]) for name, read in readers.items() if name in found}

    return parse


def read_table(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source],
    parse: Parse[dict[str, Any]],
    noun: str,
    *,
    columns: Mapping[str, str | None] | None = None,
    on_error: str = "raise",
    names: Sequence[str] | None = None,
) -> tuple[Dataset, Counts]:
    """What `parse` makes of each row of sources, one after the other, as a table; and counts.

    Args:
        source, columns, on_error: see read_pairs.
        parse: gives all rows the same columns.
        noun: what a row is, for messages.
        names: as for to_table.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed row (named by file and line), no row left of a source, or sources with other columns.
    """
    listed = [source] if isinstance(source, (str, os.PathLike, Source)) else list(source)
    if not listed:
        raise ValueError("source names nothing to read")
    tables, counts = [], []
    for opened in [open_source(each, columns) for each in listed]:
        tally = Tally(on_error)
        table = to_table(each_kept(opened, parse, tally), names)
        counts.append(tally.counts(opened.name, len(table), noun))
        if out := tally.dropped.total():
            logger.warning("%s: %d of %d rows left out: %s", opened.name, out, len(table) + out, counts[-1]["dropped"])
        tables.append(table)
        if table.column_names != tables[0].column_names:
            raise ValueError(
                f"{listed[0]} has columns {tables[0].column_names}, but {opened.name} has {table.column_names}"
            )
    if len(tables) == 1:
        return tables[0], counts[0]
    from datasets import concatenate_datasets

    dropped: Counter[str] = sum((Counter(each["dropped"]) for each in counts), Counter())
    total = {key: sum(each[key] for each in counts) for key in ("read", "kept")}
    return concatenate_datasets(tables), {**total, "dropped": dict(dropped)}
