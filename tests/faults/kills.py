"""Kill jobs at random moments, run them again until they finish, and compare the result with an undisturbed run.

Every attempt is a process of its own, forked from one that has only imported what the jobs import (tests/forked.py): so
moments fall into the job and not into seconds of imports. There are two kinds of moments. One is a time, drawn from as
long as the undisturbed run took; then SIGKILL comes from outside. The other is the n-th time that the job opens a file
for writing, renames or removes one or makes or removes a folder, n drawn from as many as the undisturbed run had; there
the process ends itself, before this happens (SIGKILL) or some microseconds later (a timer's SIGALRM, which nobody
handles and which is as sudden). The second kind is what finds a file that is there but empty.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.forked import context

SHARD = 16  # rows: small, for many shards
LONGEST = 300  # delay of the timer, microseconds
CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.truncate": 1}  # and how many of its
# arguments may be paths
ENDS = (-signal.SIGKILL, -signal.SIGALRM)


@dataclass
class Job:
    """A job to kill.

    Attributes:
        name: the name of the job.
        keys: function of a folder; the recipe with an `output` in it.
        result: function of a folder; the content that must not depend on kills.
    """

    name: str
    keys: Callable[[Path], dict[str, Any]]
    result: Callable[[Path], Any]


@dataclass
class Moment:
    """When an attempt ends: after `seconds`, or at the file operation `operation`, `delay` microseconds later."""

    seconds: float | None = None
    operation: int = 0
    delay: int = 0


@dataclass
class Tally:
    """Kills by kind, finished outputs, and interrupted operations."""

    kills: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    seconds: float = 0.0  # from the undisturbed run
    operations: int = 0
    places: Counter[str] = field(default_factory=Counter)


def attempt(job: Job, folder: Path, moment: Moment) -> tuple[int, float, int, str]:
    """(exit status, seconds, file operations, where it was cut) of one process that does `job` in `folder`."""
    operations, place = context().RawValue("i", 0), context().RawArray("c", 200)
    process = context().Process(
        target=_do, args=(job.name, job.keys(folder), str(folder), moment, operations, place, str(folder) + ".log")
    )
    began = time.perf_counter()
    process.start()
    process.join(moment.seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return int(process.exitcode or 0), time.perf_counter() - began, operations.value, place.value.decode()


def disturbed(job: Job, folder: Path, kills: int, seed: int) -> Tally:
    """Kill `job` `kills` times, on as many outputs as needed, and compare each finished output.

    AssertionError if a run ends differently or has another result; the message has the seed and the log.
    """
    rng = random.Random(f"{job.name} {seed}")
    whole = folder / "whole"
    whole.mkdir(parents=True)
    status, seconds, operations, _ = attempt(job, whole, Moment())
    assert status == 0, f"{job.name} fails undisturbed:\n{_log(whole)}"
    expected = job.result(whole)
    shutil.rmtree(whole)
    tally, output = Tally(seconds=seconds, operations=operations), folder / "whole"  # results contain the name
    while kills or output.exists():
        output.mkdir(exist_ok=True)
        moment = _draw(rng, seconds, operations) if kills else Moment()
        status, _, _, place = attempt(job, output, moment)
        if status in ENDS:
            kills -= 1
            kind = "by time" if moment.seconds is not None else "at a file operation"
            tally.kills[kind] += 1
            if place:
                tally.places[place] += 1
            continue
        where = f"{job.name}, seed {seed}, {sum(tally.kills.values())} kills, the last {place or moment}"
        assert status == 0, f"{where}: exit status {status}\n{_log(output)}"
        result = job.result(output)
        assert result == expected, f"{where}: {_first_difference(result, expected)}"
        tally.finished += 1
        shutil.rmtree(output)
    return tally


def _draw(rng: random.Random, seconds: float, operations: int) -> Moment:
    if rng.random() < 0.5:
        return Moment(seconds=rng.uniform(0, seconds))
    return Moment(operation=rng.randint(1, operations), delay=rng.choice([0, rng.randint(1, LONGEST)]))


def _do(name: str, keys: dict[str, Any], folder: str, moment: Moment, operations: Any, place: Any, log: str) -> None:
    """In the child: run the job, count its file operations, and exit at `moment`."""
    from raoe_train import parts
    from raoe_train.cli import run

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    parts.SHARD = SHARD

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        paths = changed(event, arguments, folder)
        if not paths:
            return
        operations.value += 1
        if operations.value == moment.operation:
            place.value = f"{event} {os.path.relpath(os.fspath(paths[-1]), folder)}".encode()[:200]
            if moment.delay:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, moment.delay / 1e6)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    result = run(name, None, **keys)
    sys.exit(1 if result.get("failed") else 0)


def changed(event: str, arguments: tuple[Any, ...], folder: str) -> tuple[Any, ...]:
    """The paths below a folder that an audited event changes."""
    if event == "open":
        writes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        paths = arguments[:1] if writes else ()
    else:
        paths = arguments[: CHANGES.get(event, 0)]
    there = any(isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(folder) for path in paths)
    return paths if there else ()


def _log(folder: Path) -> str:
    return Path(str(folder) + ".log").read_text(encoding="utf-8", errors="replace")[-6000:]


def _first_difference(found: Any, expected: Any, where: str = "") -> str:
    if isinstance(found, list) and isinstance(expected, list):
        found, expected = dict(enumerate(found)), dict(enumerate(expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys(), key=str):
            if key not in found or key not in expected:
                return f"{where}/{key} is only in the {'undisturbed' if key in expected else 'killed'} run's"
            if found[key] != expected[key]:
                return _first_difference(found[key], expected[key], f"{where}/{key}")
    return f"{where} is {str(found)[:300]}, undisturbed {str(expected)[:300]}"
