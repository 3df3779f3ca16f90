"""``python -m tests.fuzz [--cases N] [--seed S] [--only KIND …]``: read damaged variants of valid files.

A case is right where the reading ends in an error of ours, one sentence that names the file, or in right rows: those of
a naive reading (naive.py); of a file that says the same in another way, all that were written.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.mutations import packed, spoilt_bytes, spoilt_rows, written
from tests.fuzz.naive import Broken, records, unpacked
from tests.fuzz.tables import TABLES, Table, alike, same_order

LONGEST = 5000  # characters of a message


def said(error: BaseException, name: str) -> str:
    """Return "error" for a one-sentence error that names the file; else a description of the fault."""
    if type(error) not in (ValueError, FileNotFoundError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:150]}"
    return "error" if name in str(error) and len(str(error)) < LONGEST else f"unclear: {str(error)[:300]}"


def ends(table: Table, rng: Random, folder: Path) -> str:
    """How a case ends: "rows", "error", or a description of the fault."""
    kind, same = rng.choice(table.kinds), rng.random() < 0.25
    zipped = kind != "parquet" and rng.random() < 0.2
    rows = table.rows(rng)
    valid = written(rows, kind, Random(0), plain=True)
    if not same and rng.random() < 0.5:
        rows = spoilt_rows(rows, kind, rng)
    content = written(rows, kind, rng, plain=not same)
    if not same:
        for _ in range(rng.choice((0, 1, 1, 2))):
            content = spoilt_bytes(content, rng)
    if zipped:
        content = packed(content, rng, plain=not same)
        if not same and rng.random() < 0.5:
            content = spoilt_bytes(content, rng)
    name = f"rows.{kind}{'.gz' * zipped}"
    (folder / name).write_bytes(content)
    try:
        naive = list(records(unpacked(content) if zipped else content, kind))
    except Broken:
        naive = []
    right = table.right(list(records(valid, kind)) if same else naive)
    how = rng.choice(("raise", "skip"))
    try:
        result, counts = table.read(str(folder / name), how)
    except BaseException as error:
        return f"refused what is right: {error}" if same and right else said(error, name)
    if counts and counts["kept"] + sum(counts["dropped"].values()) != counts["read"]:
        return f"wrong counts: {counts}"
    if table.ordered and (same or how == "raise"):
        return "rows" if alike(result, right) else f"wrong: {str(result)[:400]} and not {str(right)[:400]}"
    if table.ordered:
        return "rows" if same_order(result, right) else f"not right: {str(result)[:400]} of {str(right)[:400]}"
    wrong = [row for row in result if row not in right and table is not TABLES["captions"]]
    if table is TABLES["captions"]:
        those = dict(right)
        wrong = [row for row in result if not same_order(row[1], those.get(row[0], []))]
    return f"not right: {str(wrong)[:400]} of {str(right)[:400]}" if wrong else "rows"


def tried(
    cases: int, seed: int, only: list[str] | None = None
) -> tuple[Counter[tuple[str, str]], list[tuple[int, str, str]]]:
    """Return ({(kind, ending): count}, [(number, kind, fault)]) of `count` cases."""
    kinds = only or [*TABLES]
    counts: Counter[tuple[str, str]] = Counter()
    bad = []
    logging.disable(logging.WARNING)  # number of skipped rows
    try:
        with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            for case in range(cases):
                rng = Random(f"{seed} {case}")
                kind = rng.choice(kinds)
                folder = Path(made) / str(case)
                folder.mkdir()
                end = ends(TABLES[kind], rng, folder)
                counts[kind, end if end in ("rows", "error") else "wrong"] += 1
                if end not in ("rows", "error"):
                    bad.append((case, kind, end))
    finally:
        logging.disable(logging.NOTSET)
    return counts, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=[*TABLES])
    chosen = parser.parse_args()
    began = time.process_time()
    counts, bad = tried(chosen.cases, chosen.seed, chosen.only)
    for case, kind, end in bad:
        print(f"{kind}, case {case}: {end!a}")
    for kind in TABLES:
        its = {end: counts[kind, end] for end in ("rows", "error", "wrong")}
        if any(its.values()):
            print(f"{kind:>14}: " + ", ".join(f"{count} {end}" for end, count in its.items()))
    took = time.process_time() - began
    print(f"{chosen.cases} cases, seed {chosen.seed}: {len(bad)} wrong; {took:.0f} s of one core")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
