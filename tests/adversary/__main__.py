"""``python -m tests.adversary [--kind calls] [--cases N] [--seed S]``: invalid commands, or calls in Python."""

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import torch

from raoe_train.cli import main
from tests.adversary.calls import NAMES, calls
from tests.adversary.cases import Case, cases

RIDDLES = re.compile("unsupported operand|object is not|has no attribute|'NoneType' object|must be str, not|unhashable|"
                     "not supported between|argument of type|values to unpack")  # fmt: skip
KINDS = {"commands": cases, "calls": calls}
KEPT = {"thesis/chapter.tex": b"two years", "data.tsv": b"sentence1\tsentence2\n"}  # no case may change it


class Hung(BaseException):
    """After a minute, and again, where somebody ignores it."""


def _hung(*_: object) -> None:
    raise Hung


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
    signal.setitimer(signal.ITIMER_REAL, 60, 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(output):
            end, status = (called(case), 0) if case.call else ("", main(list(case.words)))
    except BaseException as error:  # everything printed here is what a user would see
        return f"crash ({type(error).__name__})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
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
        return end or "silent"
    return "error" if not case.words or (last and len(output.getvalue()) < 20_000) else "unclear"


def called(case: Case) -> str:
    """How a call ends. A TypeError of Python itself is as good as ours, but for settings that we declare."""
    try:
        result = eval(case.call, dict(NAMES))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        ours = any(name in at.filename for name in ("/raoe_", "/adversary/", "<string>"))
        known = isinstance(error, ValueError | OSError | ImportError | FloatingPointError)
        known |= isinstance(error, TypeError | RuntimeError) and ours
        is_clear = known and not RIDDLES.search(str(error)) and len(str(error)) < 20_000
        if is_clear or (isinstance(error, TypeError) and case.call.startswith(("trained", "rt.read", "rt.cal"))):
            return "error"
        return f"riddle ({Path(at.filename).name}:{at.lineno} {type(error).__name__}: {str(error)[:150]!a})"
    values = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else [result]
    numbers = [torch.as_tensor(each) for each in values if isinstance(each, float | torch.Tensor)]
    finite = any(word in case.call for word in ("nan", "meta")) or all(bool(each.isfinite().all()) for each in numbers)
    return "silent" if not case.may else "done" if finite else "not finite"


def tried(chosen: list[Case]) -> tuple[Counter[str], list[tuple[str, Case]]]:
    """Return (counts of endings, cases with a wrong ending)."""
    result: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            end = ends(case, Path(folder) / "here")
            result[end] += 1
            if end not in ("error", "done"):
                bad.append((end, case))
    return result, bad


def sample(count: int | None, seed: int, kind: str) -> list[Case]:
    """Draw `count` cases of KINDS with `seed`."""
    every = list(KINDS[kind]())
    return every if count is None or count >= len(every) else random.Random(seed).sample(every, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="commands")
    options = parser.parse_args()
    counts, failed = tried(sample(options.cases, options.seed, options.kind))
    for end, case in failed:
        words = case.call[:500] or f"raoe-train {' '.join(word[:60] for word in case.words)!a} {list(case.files)}"
        print(f"{end}: {words}")
    print(", ".join(f"{count} {end}" for end, count in counts.most_common()))
    sys.exit(bool(failed))
