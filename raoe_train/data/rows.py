"""The rows of sources as tables: one rule for what is malformed, what is left out, and what is counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raoe_train.data.columns import RowProblem
from raoe_train.data.sources import Source
from raoe_train.data.tables import to_table

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")
Parse = Callable[[dict[str, Any], Source], Parsed]
"""(a row's fields, its source) -> what to keep of it; RowProblem for a row that cannot be used."""


class Tally:
    """What is left out of sources' rows, and why: `dropped` rows by reason, and `examples`, the first of them."""

    def __init__(self, on_error: str) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        self.on_error = on_error
        self.dropped: Counter[str] = Counter()
        self.examples: list[str] = []

    def refuse(self, source: Source, problem: RowProblem) -> None:
        """Leave the source's row out; ValueError, with file and line, for a malformed one that is not to be skipped."""
        where = f"{source.place()}: {problem}"
        if problem.malformed and self.on_error == "raise":
            raise ValueError(where) from None
        self.dropped[problem.reason] += 1
        if len(self.examples) < 3:
            self.examples.append(where)

    def why(self) -> str:
        """What was left out, by reason."""
        return ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items()) or "there are no rows"

    def listed(self) -> str:
        """The examples, a line each."""
        return "".join(f"\n  {example}" for example in self.examples)

    def counts(self, source: Source, kept: int, noun: str) -> dict[str, Any]:
        """Of a source that was read to its end, see read_table; ValueError where nothing was kept."""
        out = self.dropped.total()
        read = kept + out
        if not kept:
            raise ValueError(f"{source.name}: no {noun} left of {read} rows: {self.why()}{self.listed()}")
        if out:
            logger.warning("%s: %d of %d rows left out: %s", source.name, out, read, dict(self.dropped))
        split = source.other_split
        return {"read": read + split, "kept": kept, "other_split": split, "dropped": dict(self.dropped)}


def each_kept(source: Source, parse: Parse[Parsed], tally: Tally) -> Iterator[Parsed]:
    """What `parse` makes of each row of a source; those that cannot be used go to `tally`. A ValueError gets the row's
    file and line."""
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


def read_table(
    sources: Sequence[Source],
    parse: Parse[dict[str, Any]],
    noun: str,
    on_error: str,
    path: Path | None = None,
    names: Sequence[str] | None = None,
) -> tuple[Dataset, dict[str, Any]]:
    """What `parse` makes of each row of sources, one after the other, as a table; and counts.

    Args:
        parse: gives all rows of a source the same columns.
        noun: what a row is, for messages.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.
        path, names: as for to_table; a path is for one source.

    Returns:
        (Dataset, {"read": rows read, "kept", "other_split": rows of splits not asked for, "dropped": {reason: rows}});
        read = kept + other_split + all dropped.

    Raises:
        ValueError: a malformed row (named by file and line), no row left, or sources with other columns, of which only
            `subset` may be missing in some.
    """
    if not sources:
        raise ValueError("source names nothing to read")
    parts = []
    for source in sources:
        tally = Tally(on_error)
        table = to_table(each_kept(source, parse, tally), path, names)
        parts.append((table, tally.counts(source, len(table), noun)))
    return parts[0] if len(parts) == 1 else _concatenated(parts, [source.name for source in sources])


def _concatenated(parts: Sequence[tuple[Dataset, dict[str, Any]]], sources: Sequence[str]) -> tuple[Dataset, Any]:
    from datasets import concatenate_datasets

    tables, counts = zip(*parts, strict=True)
    shared = [set(table.column_names) - {"subset"} for table in tables]
    for name, columns in zip(sources, shared, strict=True):
        if columns != shared[0]:
            raise ValueError(f"{sources[0]} has columns {sorted(shared[0])}, but {name} has {sorted(columns)}")
    everywhere = [name for name in tables[0].column_names if all(name in table.column_names for table in tables)]
    dropped: Counter[str] = Counter()
    for each in counts:
        dropped.update(each["dropped"])
    total = {key: sum(each[key] for each in counts) for key in ("read", "kept", "other_split")}
    joined = concatenate_datasets([table.select_columns(everywhere) for table in tables])
    return joined, {**total, "dropped": dict(dropped)}
