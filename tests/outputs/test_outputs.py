"""Outputs: finished or foreign, shards and lines that survive a kill, and one owner at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from raoe_train import outputs, parts
from raoe_train.cli import main
from raoe_train.outputs import Output, different, digest, locked, replacing_model
from raoe_train.parts import read_parts, write_parts

SETTINGS = {"model": {"name": "m"}, "rows": None}
OTHER = {"model": {"name": "n"}, "rows": None}


def finished(path, settings=SETTINGS, **how):
    """A finished output with these settings: a file, or a folder with one file."""
    output = Output(path, settings, **how)
    assert output.finished() is None
    output.begin("a")
    written = output.path / "a" if output.folder else output.path
    written.write_text("made")
    output.finish({"rows": 3})
    return output


@pytest.mark.parametrize("folder", [False, True])
def test_finished_output_is_matched_by_its_settings(tmp_path, folder):
    output = finished(tmp_path / "out", folder=folder)
    output.parts.mkdir(parents=True)  # left by a kill right after the record
    again = Output(tmp_path / "out", SETTINGS, folder=folder).finished()
    assert (again["rows"], again["settings"], again["output"]) == (3, SETTINGS, str(tmp_path / "out"))
    assert "torch" in again["versions"] and (folder or not output.all_parts.exists())
    with pytest.raises(ValueError, match=r"with other settings or inputs \(different: model\.name\): choose another"):
        Output(tmp_path / "out", OTHER, folder=folder).finished()
    other = Output(tmp_path / "out", OTHER, overwrite=True, folder=folder)
    assert other.finished() is None and other.parts != output.parts  # never goes on with parts of other settings
    if not folder:
        (tmp_path / "out").unlink()  # the user wants a new one
        assert Output(tmp_path / "out", SETTINGS).finished() is None


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_never_replaced(tmp_path, folder, overwrite):
    foreign = tmp_path / "out" / "thesis.tex" if folder else tmp_path / "out"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("two years")
    with pytest.raises(ValueError, match="was not written by raoe-train"):
        Output(tmp_path / "out", SETTINGS, overwrite, folder=folder).finished()
    with pytest.raises(ValueError, match="is a file, but" if not folder else "is a folder, but"):
        Output(tmp_path / "out", SETTINGS, overwrite, folder=not folder).finished()
    assert foreign.read_text() == "two years"


def test_overwriting_removes_only_recorded_files(tmp_path):
    old = Output(tmp_path / "out", SETTINGS, folder=True)
    old.path.mkdir()
    old.begin("../escape", "note", "link/theirs")
    (tmp_path / "elsewhere").mkdir()
    (old.path / "link").symlink_to(tmp_path / "elsewhere")
    with replacing_model(old) as saved:
        for folder in ("1_Pooling", "2_Dense"):
            (saved / folder / "deep").mkdir(parents=True)
            (saved / folder / "deep" / "config.json").touch()
    for name in ("../escape", "note", "link/theirs"):
        (old.path / name).write_text("x")
    old.finish({})
    kept = ("mine.txt", "1_Pooling/mine.txt", "2_Dense/deep/mine.txt")
    for name in kept:
        (old.path / name).write_text("x")
    new = Output(tmp_path / "out", OTHER, overwrite=True, folder=True)
    assert new.finished() is None and new.replaces and not old.replaces
    new.begin("b")
    left = {str(path.relative_to(old.path)) for path in old.path.rglob("*") if path.is_file()}
    assert left == {"made_from.json", *kept} and not (old.path / "1_Pooling/deep").exists()
    assert (tmp_path / "escape").exists() and (tmp_path / "elsewhere/theirs").exists()
    with replacing_model(new) as saved:  # a folder that also holds a user's file
        (saved / "1_Pooling").mkdir()
        (saved / "1_Pooling/config.json").touch()
    assert sorted(os.listdir(old.path / "1_Pooling")) == ["config.json", "mine.txt"]
    assert not new.replaces and new.finished() is None  # started, not finished
    new.begin("c")  # resuming keeps the earlier entries
    assert json.loads(new.record.read_text())["files"] == ["b", "1_Pooling", "c"]


def test_partial_record_is_accepted_and_damaged_record_refused(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".partial.made_from.json").write_text('{"sett')
    assert Output(tmp_path / "folder", SETTINGS, folder=True).finished() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert Output(tmp_path / "folder", SETTINGS, folder=True).finished() is None  # left by another rank
    monkeypatch.setenv("RANK", "0")
    output = finished(tmp_path / "out")
    output.record.write_text("{")
    with pytest.raises(ValueError, match="was not written by raoe-train"):
        output.finished()


def test_settings_differ_by_key():
    assert different({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ["a.c"]
    assert different({"a": None}, {}) == ["a"] == different({}, {"a": None})  # null is not absent
    assert different({"a": 1}, {"a": True}) == ["a"] and different({"a": 1}, {"a": 1.0}) == []
    assert different(None, {}) == ["all"] and different({"a": [1, {}]}, {"a": [1, {}]}) == []
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


def squares(folder, items=range(10), made=None):
    def make(run):
        if made is not None:
            made.append(list(run))
        return np.square(np.asarray(run))

    return read_parts(write_parts(folder, items, make, "squares", 3)).tolist()


def test_parts_are_computed_once(tmp_path, capsys):
    made: list = []
    assert squares(tmp_path, made=made) == [n * n for n in range(10)] and len(made) == 4
    assert squares(tmp_path, made=made) == [n * n for n in range(10)] and len(made) == 4
    (tmp_path / "000000009+3.npy").unlink()
    (tmp_path / ".partial.000000009+3.npy").write_bytes(b"half")  # left by a kill
    assert squares(tmp_path, made=made) == [n * n for n in range(10)] and made[4:] == [[9]]
    assert "squares: resuming after 3 of 4 parts" in capsys.readouterr().out
    assert read_parts(write_parts(tmp_path, range(10), np.array, "n", 4)).tolist() == [*range(10)]


def test_each_process_makes_its_share_of_the_shards(tmp_path, monkeypatch):
    made: list = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(parts, "PATIENCE", 0.3)
    for rank in (2, 0):
        monkeypatch.setenv("RANK", str(rank))
        paths = write_parts(tmp_path, range(16), lambda run: made.append([*run]) or np.square([*run]), "squares", 3)
    assert made[:4] == [[6, 7, 8], [15], [0, 1, 2], [9, 10, 11]]
    assert made[4:] == [[12, 13, 14], [3, 4, 5]]  # those of rank 1, which does not come, made by rank 0 from the end
    assert read_parts(paths).tolist() == [n * n for n in range(16)]
    made.clear()
    monkeypatch.setenv("RANK", "1")
    write_parts(tmp_path / "2", range(16), lambda run: made.append([*run]) or np.square([*run]), "n", 3, sync=True)
    assert made == [[3, 4, 5], [12, 13, 14], [15], [9, 10, 11], [6, 7, 8], [0, 1, 2]]


def test_the_progress_bar_counts_the_parts_of_all_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, shown in ((1, None), (0, "6/6")):
        monkeypatch.setenv("RANK", str(rank))
        write_parts(tmp_path, range(16), np.square, "squares", 3)
        printed = capsys.readouterr()
        assert (f"| {shown} [" in printed.err) if shown else not printed.err
        assert not printed.out  # the other process is not resumed work


def test_processes_do_not_share_a_temporary_file(tmp_path, monkeypatch):
    """Rank 0 may write a part that a slow process is writing, too."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    names = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        names.add(outputs.partial(tmp_path / "part.npy").name)
    assert len(names) == 2


PEAK = r"""
import re, sys
from pathlib import Path
from raoe_train.parts import read_parts

peak = lambda: 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
whole = read_parts(sorted(Path(sys.argv[1]).iterdir()))
print(whole.shape, (peak() - before) / whole.nbytes)
"""


def test_parts_are_read_without_a_second_copy(tmp_path):
    """Neither in memory nor mapped."""
    write_parts(tmp_path, range(64), lambda run: np.ones((len(run), 500_000), np.float32), "ones", 2)
    ended = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True)
    shape, _, peak = ended.stdout.rpartition(" ")
    assert shape == "(64, 500000)" and float(peak) < 1.2, ended.stderr


def test_wait_ends_if_rank_zero_has_ended(tmp_path, monkeypatch):
    """While it holds the lock, however long it takes, the others wait."""
    monkeypatch.setattr(outputs, "PATIENCE", 0.3)
    path = tmp_path / "out.json"
    held = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    held.stdout.readline()
    output, ended = Output(path, {"seed": 1}), []

    def wait():
        with pytest.raises(OSError, match="rank 0 has ended without writing") as error:
            output.wait()
        ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(2)
    assert waiting.is_alive()
    held.kill()
    waiting.join(30)
    assert ended
    held.wait()


HOLDER = "import sys; from raoe_train.outputs import locked\n" \
    "with locked(sys.argv[1]): print(flush=True); sys.stdin.read()"  # fmt: skip


def test_output_has_one_owner_under_any_name_until_it_is_killed(tmp_path, capsys):
    output = tmp_path / "new" / "out.json"
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "other.json").symlink_to(output)
    held = subprocess.Popen([sys.executable, "-c", HOLDER, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    held.stdout.readline()
    for name in (output, tmp_path / "link" / "out.json", tmp_path / "other.json"):
        for job in ("score", "mine", "encode"):  # before they look at anything else
            assert main([job, "--output", str(name)]) == 2
            assert f"another process is writing to {output}: wait" in capsys.readouterr().err
    held.kill()
    held.wait()
    with locked(output):
        pass
    assert os.listdir(tmp_path / "new") == []
