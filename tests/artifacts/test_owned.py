"""Who owns an output: one process at a time, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raoe_train.artifacts.processes import owned
from raoe_train.cli import main

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


def test_what_is_made_for_the_lock_goes_with_it(tmp_path):
    with pytest.raises(RuntimeError), owned(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b" / "out.lock").exists()
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_what_may_not_be_written_may_be_read(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with owned(tmp_path / "out"):
        pass
