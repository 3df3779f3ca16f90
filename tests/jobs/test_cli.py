"""The command line: options, errors in one line, exit status."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raoe_train import cli


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown job 'trian' (did you mean train?)"),
        (["mine"], "--data.input is missing"),
        (["train", "demo", "--output", "x", "--trainin.seed", "1"], "(did you mean training.seed?)"),
        (["train", "raoe-s1", "--output", "x"], "--data.train is missing"),
        (["train", "nowhere/recipe.yaml"], "no such file: nowhere/recipe.yaml"),
    ],
)
def test_user_errors_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("raoe-train: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def does(monkeypatch):
    """does(work): replace the job of every command by `work`, a function of its configuration."""

    def replace(work):
        monkeypatch.setattr(cli, "job_of", lambda _: work)

    return replace


def test_partial_failure_has_exit_status_1(does):
    for failed, status in (["one"], 1), ([], 0):
        does(lambda config, failed=failed: {"failed": failed})
        assert cli.main(["encode"]) == status


@pytest.mark.parametrize("job", ["check", "export", "prepare"])
def test_jobs_for_one_process_refuse_several(job, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([job]) == 2
    assert f"{job} runs in one process: start it without torchrun" in capsys.readouterr().err


def test_evaluate_needs_an_output_in_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["evaluate", "--model.name", "encoder", "--tasks", "sts"]) == 2
    assert "--output is missing: several processes" in capsys.readouterr().err


def test_unexpected_errors_are_one_line_and_a_traceback_file(monkeypatch, tmp_path, capsys, does):
    def broken(config):
        raise KeyError("a bug\nin \ud800 lines")

    does(broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for words in ([], ["--output", str(tmp_path / "out")], ["--output", str(tmp_path / "nowhere" / "out")]):
        assert cli.main(["encode", *words]) == 3
        output = capsys.readouterr().err
        assert output.startswith("raoe-train: KeyError: 'a bug") and output.count("\n") == 1
        trace = Path(re.search(r"the traceback is in (.*)\)", output)[1])
        assert trace.parent == tmp_path and "in broken" in trace.read_text()
    with pytest.raises(KeyError):
        cli.main(["encode", "--traceback"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("no tqdm", name="tqdm"), "tqdm is not installed: install raoe[train]"),
        (ModuleNotFoundError("", name="bitsandbytes"), "bitsandbytes is not installed: install raoe[4bit]"),
        # packages that a model's own code imports, and modules missing from another version, are not extras of raoe
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "No module named 'einops'"),
        (ModuleNotFoundError("No module named 'peft.new'", name="peft.new"), "No module named 'peft.new'"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory: try --"),
        (MemoryError(), "out of memory: try --"),
        (FloatingPointError("step 2: the loss is nan"), "step 2: the loss is nan"),
    ],
)
def test_missing_package_or_file(capsys, does, error, said):
    def ends(config):
        raise error

    does(ends)
    assert cli.main(["encode"]) == 2
    last = capsys.readouterr().err
    assert last.startswith(f"raoe-train: {said}") and "unexpected" not in last and last.count("\n") == 1
    assert ("pip install" in last) == ("install raoe" in said)


def test_a_deleted_working_folder_and_an_unknown_home_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["encode", "--output", "o.npy"]) == 2
    assert capsys.readouterr().err.startswith("raoe-train: the working folder no longer exists")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])  # a container's user without a name
    assert cli.main(["encode", "--data.input", "~/a.txt", "--output", "o.npy"]) == 2
    assert capsys.readouterr().err.startswith("raoe-train: the home folder is unknown: set HOME")


def test_without_a_terminal_a_progress_bar_is_a_line_a_minute():
    code = """from raoe_train.cli import main
main(["--version"])
from tqdm import trange
bar = trange(3)
print(bar.disable, bar.delay, bar.mininterval)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False 60.0 60.0\n") and not done.stderr


def test_closed_pipe_is_not_an_error():
    code = "import sys; from raoe_train.cli import main; sys.exit(main(['encode', '--print_config']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
