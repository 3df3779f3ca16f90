"""State machines of shards, lines and run folders, with changes, kills and several processes. After each step the
files must equal those of a new computation.

A kill is a child that ends itself at its n-th change of a file, as suddenly as SIGKILL ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from raoe_train.artifacts import resume
from raoe_train.artifacts.resume import Output, SharedRows, beside
from tests.faults.kills import changed

KILLED = 9


def child(work: Callable[[], object], folder: Path, last: int = 0) -> int:
    """Start a child that does `work` and kills itself at its file change number `last` in `folder`; return its id."""
    if pid := os.fork():
        return pid
    operations = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if changed(event, arguments, str(folder)):
            operations += 1
            if operations == last:
                os._exit(KILLED)

    sys.addaudithook(hook)
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(*children: int) -> set[int]:
    """Return the exit statuses of children."""
    return {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}


def shards(folder: Path, rng: Random, steps: int) -> None:
    """Shards by one or two processes, which may be killed, equal a single computation."""
    items = np.arange(rng.randrange(1, 40))
    for _ in range(steps):
        if rng.random() < 0.2:
            shutil.rmtree(folder / "parts", ignore_errors=True)

        def make(rank: int, world: int) -> Callable[[], object]:
            def work() -> None:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
                result = resume.gather(resume.share(folder / "parts", items, 3, np.square, "squares"))
                assert result.tolist() == [n * n for n in range(len(items))]

            return work

        if rng.random() < 0.7:
            assert ended(child(make(0, 1), folder, rng.randrange(1, 30))) <= {0, KILLED}
        world = rng.choice((1, 2, 3))
        assert ended(*(child(make(rank, world), folder) for rank in range(world))) == {0}


def lines(folder: Path, rng: Random, steps: int) -> None:
    """Rows of two processes, which may be killed: the last process merges all of them once and in order."""
    for step in range(steps):
        output = Output(folder / str(step) / "lines.jsonl", {})
        ids = range(rng.randrange(1, 9))

        def write(rank: int, output: Output = output, ids: range = ids) -> Callable[[], object]:
            def work() -> None:
                os.environ.update(RANK=str(rank), WORLD_SIZE="2")
                of = SharedRows(output)
                for key in sorted({*ids[rank::2]} - {*of.read()}):
                    of.write(key, {"id": key, "text": "é" * key, **({"reason": "x"} if key % 3 == 2 else {})})
                rows = of.read()
                if {*ids} == {*rows}:
                    of.merge(rows[key] for key in ids)
                    output.finish({})

            return work

        for _ in range(rng.randrange(3)):
            assert ended(child(write(rng.randrange(2)), folder, rng.randrange(1, 12))) <= {0, KILLED}
        for rank in (0, 1):
            assert ended(child(write(rank), folder)) == {0}
        good, bad = ([key for key in ids if (key % 3 == 2) == refused] for refused in (False, True))
        results = [json.loads(line)["id"] for line in output.path.read_text("utf-8").splitlines()]
        failed = beside(output.path, ".failed.jsonl")
        assert results == good and failed.exists() == bool(bad) and output.finished() is not None
        assert not bad or [json.loads(line)["id"] for line in failed.read_text("utf-8").splitlines()] == bad


MACHINES: dict[str, Callable[[Path, Random, int], None]] = {"shards": shards, "lines": lines}


def driven(name: str, folder: Path, seed: int, steps: int) -> None:
    """Run `steps` steps of a machine; AssertionError for a wrong state."""
    with patch.object(resume, "POLL", 0.002):
        MACHINES[name](folder, Random(f"{name} {seed}"), steps)
