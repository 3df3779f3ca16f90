"""The rows of a source that can be used: one rule for what is malformed, what is left out, and what is counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from raoe_train.data.fields import RowProblem
from raoe_train.data.sources import Source

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")


def check_on_error(on_error: str) -> None:
    """ValueError for anything but "raise" and "skip"."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")


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
    check_on_error(on_error)
    kept: list[Parsed] = []
    dropped: Counter[str] = Counter()
    examples: list[str] = []
    for line, fields in source.rows:
        try:
            if isinstance(fields, str):
                raise RowProblem(fields, reason="blank line" if fields == "blank line" else "malformed row")
            kept.append(parse(fields))
        except RowProblem as problem:
            where = f"{source.name}, {source.unit} {line}: {problem}"
            if problem.malformed and on_error == "raise":
                raise ValueError(where) from None
            dropped[problem.reason] += 1
            if len(examples) < 3:
                examples.append(where)
    read = len(kept) + dropped.total()
    if not kept:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.items()) or "there are no rows"
        raise ValueError(
            f"{source.name}: no {noun} left of {read} rows: {reasons}" + "".join(f"\n  {e}" for e in examples)
        )
    if dropped:
        logger.warning("%s: %d of %d rows left out: %s", source.name, dropped.total(), read, dict(dropped))
    return kept, {
        "read": read + source.other_split[0],
        "kept": len(kept),
        "other_split": source.other_split[0],
        "dropped": dict(dropped),
    }
