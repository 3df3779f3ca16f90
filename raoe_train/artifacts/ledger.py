"""An append-only ledger of JSON lines by id: what a killed job wrote is there, and it goes on where it stopped.

- OUTPUT holds the good lines, OUTPUT.failed.jsonl the refused ones, which have a "reason". A line is one write,
  followed by fsync: a kill leaves whole lines and at most the beginning of one more, which the next run cuts off.
- OUTPUT.json, the job's to write, holds the settings from the beginning, and the summary, which names its "output", in
  the end. Other settings are refused.
- Several processes (ranks) each write files of their own in OUTPUT.parts/. Whichever ends last merges them. No process
  waits for another, and a rerun may have more or fewer of them.
- In the end both files are in the order of the input.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from raoe_train.artifacts.once import beside
from raoe_train.artifacts.processes import locked
from raoe_train.artifacts.writing import read_json, replacing

T = TypeVar("T")


class Ledger:
    """The files of one output, as one process (`rank` of `world`) sees them. A line is a `noun` for messages, and every
    one has `field` beside its "id"."""

    def __init__(self, output: Path, noun: str, field: str, rank: int = 0, world: int = 1) -> None:
        self.noun, self.field, self.rank, self.world = noun, field, rank, world
        self.output, self.failed = output, beside(output, ".failed.jsonl")
        self.summary, self.parts = beside(output, ".json"), beside(output, ".parts")
        self.own = {
            ok: file if world == 1 else self.parts / f"rank-{rank:05d}{'' if ok else '.failed'}.jsonl"
            for ok, file in ((True, self.output), (False, self.failed))
        }
        self._open: dict[bool, int] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock goes with the process that holds it, and leaves nothing behind."""
        with locked(self.parts, lambda: "output" in read_json(self.summary)):
            yield

    def claim(self, settings: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
        """What OUTPUT.json says of these settings, or None where there is nothing from before. Under the lock.
        ValueError where lines of other settings are in the way and `overwrite` is not set."""
        found = read_json(self.summary)
        if found.get("settings") == settings and (self.output.exists() or "output" not in found):
            return found
        there = [file for file in self._files() if file.exists()]
        if there and not overwrite:
            raise ValueError(f"{there[0]} is there already, not from these settings and inputs; overwrite replaces it")
        for file in (*there, self.summary):
            file.unlink(missing_ok=True)
        return None

    def done(self) -> set[int]:
        """The ids of all lines on disk, of every process."""
        return set(self._index())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """In this block lines can be written, by this process alone: what a kill left of one is cut off."""
        import fcntl  # Windows has none

        try:
            with self.locked():
                for ok, path in self.own.items():
                    handle = self._open[ok] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise ValueError(f"{path}: another process is writing to it") from None
                    os.ftruncate(handle, max((start + size for _, start, size in self._lines(path)), default=0))
            yield
        finally:
            while self._open:
                os.close(self._open.popitem()[1])

    def write(self, line: dict[str, Any]) -> None:
        """Put a line on disk; one with a "reason" among the refused ones."""
        handle = self._open["reason" not in line]
        left = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        while left:  # a full disk may take a part before it says so
            left = left[os.write(handle, left) :]
        os.fsync(handle)

    def finish(self, ids: Sequence[int], brief: Callable[[dict[str, Any]], T]) -> tuple[list[T], list[T]] | None:
        """Bring all lines together in the order of `ids`: what `brief` makes of each good one, and of each refused one.
        None while other processes' are missing. Under the lock."""
        index = self._index()
        if any(key not in index for key in ids):
            return None
        briefs: tuple[list[T], list[T]] = ([], [])
        with replacing(self.output) as output, replacing(self.failed) as failed:
            with open(output, "wb") as good, open(failed, "wb") as bad:
                for key in ids:
                    path, start, size = index[key]
                    with open(path, "rb") as file:
                        file.seek(start)
                        line = file.read(size)
                    fields = json.loads(line)
                    refused = "reason" in fields
                    (bad if refused else good).write(line)
                    briefs[refused].append(brief(fields))
        if not briefs[True]:
            self.failed.unlink()
        return briefs

    def _files(self) -> list[Path]:
        return [self.output, self.failed, *sorted(self.parts.glob("rank-*.jsonl"))]

    def _index(self) -> dict[int, tuple[Path, int, int]]:
        """{id: (file, start, size of its line)}. A line that was merged before a kill is in two files, alike."""
        found: dict[int, tuple[Path, int, int]] = {}
        for path in self._files():
            if path.exists():
                for key, start, size in self._lines(path):
                    found.setdefault(key, (path, start, size))
        return found

    def _lines(self, path: Path) -> Iterator[tuple[int, int, int]]:
        """(id, start, size) of each line of a file but for the beginning of one that a kill left at its end. ValueError
        for a line before the last that is none of ours."""
        start, broken = 0, 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if broken:
                    raise ValueError(
                        f"{path}, line {broken}: not a {self.noun}; was the file changed? overwrite begins anew"
                    )
                try:
                    fields = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    fields = None
                if isinstance(fields, dict) and isinstance(fields.get("id"), int) and self.field in fields:
                    yield fields["id"], start, len(line)
                else:
                    broken = number
                start += len(line)
