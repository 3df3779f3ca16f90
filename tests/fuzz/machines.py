"""State machines: what is kept, shards, and folders of runs, through changes, damage, kills, two processes and clocks
that go backwards. After every step what is found has to be what a machine without a memory would make.

A kill is a child that ends itself at its n-th change of a file, as suddenly as SIGKILL ends it.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.writing import write_json
from raoe_train.data.pairs import pair_table
from raoe_train.data.settings import Data
from raoe_train.data.sources import contents
from raoe_train.data.tables import kept
from raoe_train.encoders.settings import Model
from raoe_train.training import run_directory
from raoe_train.training.list_targets import Teacher
from tests.faults.kills import changed

KILLED = 9


def child(work: Callable[[], object], folder: Path, last: int = 0) -> int:
    """The process id of a child that does `work`, or ends itself at its change number `last` of a file in `folder`."""
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
    """The exit statuses of children."""
    return {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}


def disturbed(work: Callable[[], object], folder: Path, rng: Random) -> None:
    """`work` in a child that is killed, in two at once, or in one."""
    way = rng.randrange(3)
    if way == 0:
        assert ended(child(work, folder, rng.randrange(1, 20))) <= {0, KILLED}
    else:
        assert ended(*(child(work, folder) for _ in range(way))) == {0}


def damaged(folder: Path, rng: Random) -> None:
    """A file below a folder with other bytes, as many, its time as it was; or cut; or gone."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return
    file, way = rng.choice(files), rng.randrange(3)
    state, content = file.stat(), file.read_bytes()
    if way == 0:
        file.unlink()
    else:
        file.write_bytes(bytes(len(content)) if way == 1 else content[: len(content) // 2])
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def kept_rows(folder: Path, rng: Random, steps: int) -> None:
    """data.cache_dir: the rows of the file as it is now, whatever it was and whatever happened to what is kept."""
    source, cache = folder / "pairs.tsv", folder / "cache"
    text = ""

    def read() -> list[Any]:
        return kept(str(cache), contents(source), lambda path: pair_table(source, path=path))[0].to_list()

    for step in range(steps):
        if step == 0 or rng.random() < 0.4:
            text = rng.choice("abc")  # the same size, and at times a time before the last one
            source.write_text(f"sentence1\tsentence2\n{text}\tx\n")
            if rng.random() < 0.5:
                os.utime(source, (1e9 - step % 2, 1e9 - step % 2))
        if rng.random() < 0.4:
            damaged(cache, rng)
        if rng.random() < 0.5:
            disturbed(read, cache, rng)
        assert read() == [{"sentence1": text, "sentence2": "x"}]
        assert not list(cache.glob(".partial.*"))


def shards(folder: Path, rng: Random, steps: int) -> None:
    """What is made in shards, by one process or by two, who may be killed: as if it were made at once."""
    items = np.arange(rng.randrange(1, 40))
    for _ in range(steps):
        if rng.random() < 0.2:
            shutil.rmtree(folder / "parts", ignore_errors=True)

        def make(rank: int, world: int) -> Callable[[], object]:
            def work() -> None:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
                found = np.concatenate(once.in_shards(folder / "parts", items, 3, np.square, "squares"))
                assert found.tolist() == [n * n for n in range(len(items))]

            return work

        if rng.random() < 0.7:
            assert ended(child(make(0, 1), folder, rng.randrange(1, 30))) <= {0, KILLED}
        world = rng.choice((1, 2, 3))
        assert ended(*(child(make(rank, world), folder) for rank in range(world))) == {0}


def runs(folder: Path, rng: Random, steps: int) -> None:
    """The directory of a run: metrics are of the recipe and contents asked for, or none, beside no other model."""
    output, models = folder / "run", {"a": {"model.safetensors", "modules.json"}, "b": {"adapter", "modules.json"}}
    for step in range(steps):
        data, recipe = rng.choice("ab"), rng.choice("ab")
        arguments = SimpleNamespace(
            output=str(output),
            model=Model("m"),
            teacher=Teacher(),
            data=Data(),
            loss={"name": recipe},
            overwrite=True,
        )
        made = {"data.train 1": data}

        def begin(arguments: Any = arguments, made: Any = made) -> None:
            if run_directory.claim(arguments, made) is None:
                run_directory.begin(arguments, made)

        def save(names: set[str] = models[recipe]) -> None:
            with run_directory.replacing_model(output) as saved:
                for name in sorted(names):
                    (saved / name).touch()

        if rng.random() < 0.7:
            assert ended(child(begin, folder, rng.randrange(1, 16))) <= {0, KILLED}
        metrics = run_directory.claim(arguments, made)
        assert metrics in (None, {"of": [recipe, data]}), (step, metrics)
        begin()
        assert run_directory.changes(arguments, lambda made=made: made) == []
        if rng.random() < 0.5:
            assert ended(child(save, folder, rng.randrange(1, 16))) <= {0, KILLED}
        if rng.random() < 0.6:
            save()
            assert {path.name for path in output.iterdir()} & set.union(*models.values()) == models[recipe]
            write_json(output / "metrics.json", {"of": [recipe, data]})


MACHINES: dict[str, Callable[[Path, Random, int], None]] = {"kept rows": kept_rows, "shards": shards, "runs": runs}


def driven(name: str, folder: Path, seed: int, steps: int) -> None:
    """So many steps of a machine; AssertionError where what is found is not right."""
    with patch.object(once, "POLL", 0.002):
        MACHINES[name](folder, Random(f"{name} {seed}"), steps)
