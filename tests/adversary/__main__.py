"""``python -m tests.adversary [--cases N] [--seed S]``: invalid commands."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from raoe_train.cli import main
from tests.adversary.cases import Case, cases

KEPT = {"thesis/chapter.tex": b"two years", "data.tsv": b"sentence1\tsentence2\n"}  # no case may change it


def _hung(*_: object) -> None:
    raise TimeoutError("hung")


def ends(case: Case, folder: Path) -> str:
    """How a case ends. "error" is expected; others ("silent", "lost" …) are faults."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    for name, content in {**KEPT, **case.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    output, before, old = io.StringIO(), os.getcwd(), tempfile.tempdir
    os.chdir(folder)
    tempfile.tempdir = str(folder / "tmp")
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(60)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(output):
            status = main(list(case.words))
    except BaseException as error:  # everything printed here is what a user would see
        return f"crash ({type(error).__name__})"
    finally:
        signal.alarm(0)
        os.chdir(before)
        tempfile.tempdir = old
    if any((folder / name).read_bytes() != content for name, content in {**KEPT, **case.files}.items()):
        return "lost"
    if (folder / "ran").exists():
        return "ran code"
    last = [line for line in output.getvalue().splitlines() if line.startswith("raoe-train: ")]
    if status == 3:
        return f"unforeseen ({last[-1].split(':')[1].strip() if last else '?'})"
    if status == 0:
        return "silent"
    return "error" if not case.words or (last and len(output.getvalue()) < 20_000) else "unclear"


def tried(chosen: list[Case]) -> tuple[Counter[str], list[tuple[str, Case]]]:
    """Return (counts of endings, cases with a wrong ending)."""
    result: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            end = ends(case, Path(folder) / "here")
            result[end] += 1
            if end != "error":
                bad.append((end, case))
    return result, bad


def sample(count: int | None, seed: int) -> list[Case]:
    """Draw `count` cases with `seed`."""
    every = list(cases())
    return every if count is None or count >= len(every) else random.Random(seed).sample(every, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, failed = tried(sample(options.cases, options.seed))
    for end, case in failed:
        print(f"{end}: raoe-train {' '.join(word[:60] for word in case.words)!a} {list(case.files)}")
    print(", ".join(f"{count} {end}" for end, count in counts.most_common()))
    sys.exit(bool(failed))
