"""Who owns an output: one process at a time, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raoe_train.artifacts.processes import owned
from raoe_train.artifacts.provenance import digest
from raoe_train.cli import JOBS, main

HOLDER = "import sys; from pathlib import Path; from raoe_train.artifacts.processes import owned\n" \
    "with owned(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"  # fmt: skip


def test_one_owner_and_a_killed_one_owns_nothing(tmp_path, capsys):
    output = tmp_path / "new" / "out.json"
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    held.stdout.readline()
    for job in ("score", "check", "encode"):  # before they look at anything else
        assert main([job, "--output", str(output)]) == 2
        assert f"{output}: another process is writing to it" in capsys.readouterr().err
    held.kill()
    held.wait()
    assert (tmp_path / "new" / "out.json.lock").exists()
    with owned(output):
        pass
    assert os.listdir(tmp_path / "new") == []


def test_settings_are_the_same_in_any_order():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


def test_what_is_made_for_the_lock_goes_with_it(tmp_path):
    with pytest.raises(RuntimeError), owned(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b" / "out.lock").exists()
        raise RuntimeError
    assert os.listdir(tmp_path) == []


@pytest.fixture
def refused(monkeypatch):
    """As where nothing may be written; root, who may, is told so by hand."""

    def no(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", no)


def test_what_may_not_be_written_may_be_read(tmp_path, refused):
    (tmp_path / "out").write_text("of an earlier run")
    with owned(tmp_path / "out"):
        pass
    with pytest.raises(PermissionError), owned(tmp_path / "out", overwrite=True):
        raise AssertionError
    with pytest.raises(PermissionError), owned(tmp_path / "new"):
        raise AssertionError


@pytest.mark.parametrize("job", JOBS)
def test_an_output_that_cannot_be_written_is_found_before_anything_else(tmp_path, refused, capsys, job):
    assert main([job, "--output", str(tmp_path / "out")]) == 2
    assert f"cannot write {tmp_path / 'out'}" in capsys.readouterr().err
