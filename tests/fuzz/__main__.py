"""``python -m tests.fuzz [--cases N] [--seed S] [--only KIND …]``: read damaged variants of valid files.

A case is right where the reading ends in rows whose counts add up, or in an error of ours: one sentence that names the
file. What the rows of a valid file are: tests/data.
"""

import argparse
import logging
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.mutations import packed, spoilt_bytes, spoilt_rows, written
from tests.fuzz.tables import TABLES, Table

LONGEST = 5000  # characters of a message


def said(error: BaseException, name: str) -> str:
    """Return "error" for a one-sentence error that names the file; else a description of the fault."""
    if type(error) not in (ValueError, FileNotFoundError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:150]}"
    return "error" if name in str(error) and len(str(error)) < LONGEST else f"unclear: {str(error)[:300]}"


def ends(table: Table, rng: Random, folder: Path) -> str:
    """How a case ends: "rows", "error", or a description of the fault."""
    kind = rng.choice(table.kinds)
    rows = table.rows(rng)
    if rng.random() < 0.5:
        rows = spoilt_rows(rows, kind, rng)
    content = written(rows, kind)
    for _ in range(rng.choice((0, 1, 1, 2))):
        content = spoilt_bytes(content, rng)
    zipped = kind != "parquet" and rng.random() < 0.2
    if zipped:
        content = packed(content, rng)
        if rng.random() < 0.5:
            content = spoilt_bytes(content, rng)
    path = folder / f"rows.{kind}{'.gz' * zipped}"
    path.write_bytes(content)
    try:
        result, counts = table.read(str(path), rng.choice(("raise", "skip")))
    except BaseException as error:
        return said(error, path.name)
    if counts and counts["kept"] + sum(counts["dropped"].values()) != counts["read"]:
        return f"wrong counts: {counts}"
    return "rows" if len(result) else "error"


def tried(cases: int, seed: int, only: list[str] | None = None) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Return ({(kind, ending): count}, faults)."""
    counts: Counter[tuple[str, str]] = Counter()
    bad = []
    logging.disable(logging.WARNING)  # number of skipped rows
    try:
        with tempfile.TemporaryDirectory() as made:
            for case in range(cases):
                rng = Random(f"{seed} {case}")
                kind = rng.choice(only or [*TABLES])
                folder = Path(made) / str(case)
                folder.mkdir()
                end = ends(TABLES[kind], rng, folder)
                if end in ("rows", "error"):
                    counts[kind, end] += 1
                else:
                    bad.append(f"{kind}, case {case}: {end}")
    finally:
        logging.disable(logging.NOTSET)
    return counts, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=[*TABLES])
    chosen = parser.parse_args()
    counts, bad = tried(chosen.cases, chosen.seed, chosen.only)
    for fault in bad:
        print(ascii(fault))
    for (kind, end), count in sorted(counts.items()):
        print(f"{kind:>14}: {count} {end}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
