"""The rows of a source that can be used: one rule for what is malformed, what is left out, and what is counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from raoe_train.data.columns import RowProblem
from raoe_train.data.sources import Source

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")


def check_on_error(on_error: str) -> None:
    """ValueError for anything but "raise" and "skip"."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")


class Tally:
    """What is left out of sources' rows, and why: the one rule for rows that cannot be used.

    Args:
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.

    Attributes:
        dropped: rows by reason.
        examples: the first of them, for messages.
    """

    def __init__(self, on_error: str) -> None:
        check_on_error(on_error)
        self.on_error = on_error
        self.dropped: Counter[str] = Counter()
        self.examples: list[str] = []

    def refuse(self, source: Source, line: int, problem: RowProblem) -> None:
        """Leave a row out; ValueError, with its file and line, for a malformed one that is not to be skipped."""
        where = f"{source.name}, {source.unit} {line}: {problem}"
        if problem.malformed and self.on_error == "raise":
            raise ValueError(where) from None
        self.dropped[problem.reason] += 1
        if len(self.examples) < 3:
            self.examples.append(where)

    def counts(self, source: Source, kept: int, noun: str) -> dict[str, Any]:
        """Of a source that was read to its end, see kept_rows; ValueError where nothing was kept."""
        read = kept + self.dropped.total()
        if not kept:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items()) or "there are no rows"
            listed = "".join(f"\n  {example}" for example in self.examples)
            raise ValueError(f"{source.name}: no {noun} left of {read} rows: {reasons}{listed}")
        if self.dropped:
            out = self.dropped.total()
            logger.warning("%s: %d of %d rows left out: %s", source.name, out, read, dict(self.dropped))
        return {
            "read": read + source.other_split[0],
            "kept": kept,
            "other_split": source.other_split[0],
            "dropped": dict(self.dropped),
        }


def fields_of(row: dict[str, Any] | str) -> dict[str, Any]:
    """A row's fields; RowProblem for one that could not be read."""
    if isinstance(row, str):
        raise RowProblem(row, reason="blank line" if row == "blank line" else "malformed row")
    return row


def kept_rows(
    source: Source, parse: Callable[[dict[str, Any]], Parsed], on_error: str, noun: str
) -> tuple[list[Parsed], dict[str, Any]]:
    """What `parse` makes of each row of a source, and counts of the others.

    Args:
        source: its rows are used up.
        parse: fields -> what to keep; raises RowProblem for a row that cannot be used.
        on_error: "raise" ends at a malformed row; "skip" leaves it out and counts it.
        noun: what a row is, for messages.

    Returns:
        (kept, {"read": rows read, "kept", "other_split": rows of splits not asked for, "dropped": {reason: rows}});
        read = kept + other_split + all dropped.

    Raises:
        ValueError: a malformed row (named by file and line), or no row left.
    """
    tally = Tally(on_error)
    kept = list(each_kept(source, parse, tally))
    return kept, tally.counts(source, len(kept), noun)


def each_kept(source: Source, parse: Callable[[dict[str, Any]], Parsed], tally: Tally) -> Iterator[Parsed]:
    """kept_rows one after the other; those that cannot be used go to `tally`."""
    for line, row in source.rows:
        try:
            parsed = parse(fields_of(row))
        except RowProblem as problem:
            tally.refuse(source, line, problem)
            continue
        yield parsed
