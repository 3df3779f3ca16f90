"""The command line: options, errors in one line, exit status."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import raoe_train
from raoe_train import cli


def test_options():
    words = [
        "--output",
        "out",
        "--overwrite",
        "--data.train",
        "a",
        "b",
        "--loss.scale=-1.5",
    ]
    assert cli.parse_options([*words, "--data-dir", "d"]) == {
        "output": "out",
        "overwrite": True,
        "data.train": ["a", "b"],
        "loss.scale": "-1.5",
        "data_dir": "d",
    }
    with pytest.raises(ValueError, match=r"expected --section\.key, got 'oops'"):
        cli.parse_options(["oops"])
    with pytest.raises(ValueError, match="--data_dir is there twice"):
        cli.parse_options(["--data-dir", "a", "--data_dir=b"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown job 'trian' (did you mean train?)"),
        (["mine"], "--data.input is missing"),
        (["train", "demo", "--output", "x", "--trainin.epochs", "1"], "unknown key trainin"),
        (["train", "demo", "--output", "x", "--training.epoch", "1"], "did you mean training.epochs?"),
        (["train", "raoe-s1", "--output", "x"], "--data.train is missing"),
        (["train", "demo", "--output"], "output must be a string"),
        (
            ["train", "demo", "--output", "x", "--loss.name", "mse", "--loss.mini_batch_size", "8"],
            "loss mse has no loss.mini_batch_size",
        ),
        (["train", "demo", "--output", "x", "--loss.name", "roae"], "loss.name must be one of raoe"),
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


def test_a_job_that_failed_in_part_fails(monkeypatch):
    monkeypatch.setattr(cli, "run", lambda *_, **__: {"failed": ["one"]})
    assert cli.main(["check"]) == 1
    monkeypatch.setattr(cli, "run", lambda *_, **__: {"failed": []})
    assert cli.main(["check"]) == 0


@pytest.mark.parametrize("job", ["mine", "lists", "evaluate"])
def test_jobs_for_one_process_say_so(job, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([job]) == 2
    assert f"{job} is for one process: start it without torchrun" in capsys.readouterr().err


def test_our_own_bugs_are_one_sentence_and_a_trace(monkeypatch, tmp_path, capsys):
    def broken(*_, **__):
        raise KeyError("a bug\nin \ud800 lines")

    monkeypatch.setattr(cli, "run", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for words in ([], ["--output", str(tmp_path / "out")], ["--output", str(tmp_path / "nowhere" / "out")]):
        assert cli.main(["train", *words]) == 3
        said = capsys.readouterr().err
        assert said.startswith("raoe-train: KeyError: 'a bug") and said.count("\n") == 1
        trace = Path(re.search(r"the whole trace is in (.*)\)", said)[1])
        assert trace.parent == tmp_path and "in broken" in trace.read_text()
    with pytest.raises(KeyError):
        cli.main(["train", "--traceback"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'tqdm'", name="tqdm"), "tqdm is not installed; pip install 'raoe[train"),
        (ModuleNotFoundError("No module named 'mteb'", name="mteb"), "mteb is not installed; pip install 'raoe[eval]'"),
        # what a model's own code wants, and what another version of a library that is there lacks: none of ours
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "No module named 'einops'"),
        (ModuleNotFoundError("No module named 'peft.new'", name="peft.new"), "No module named 'peft.new'"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "memory is too small for it: smaller batches"),
        (MemoryError(), "memory is too small for it: smaller batches"),
    ],
)
def test_what_is_not_there(monkeypatch, capsys, error, said):
    def ends(*_, **__):
        raise error

    monkeypatch.setattr(cli, "run", ends)
    assert cli.main(["check"]) == 2
    last = capsys.readouterr().err
    assert last.startswith(f"raoe-train: {said}") and "unforeseen" not in last and last.count("\n") == 1
    assert ("raoe[" in last) == ("raoe[" in said)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("triton", "cannot run cosine on cpu"),
        pytest.param("tritn", "must be one of", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_a_backend_that_cannot_run_is_said_before_anything_is_read(tmp_path, word, said):
    """In a process of its own: the variable is read once."""
    command = [sys.executable, "-m", "raoe_train", "train", "demo", "--model.device", "cpu", "--data.train", "no.tsv"]
    command += ["--output", str(tmp_path / "out")]
    said_so = {**os.environ, "RAOE_KERNELS_BACKEND": word, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=said_so, capture_output=True, text=True)
    assert done.returncode == 2 and "RAOE_KERNELS_BACKEND" in done.stderr and said in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_an_attention_that_is_not_installed(tmp_path, capsys):
    from tests.tiny import saved_encoder

    (tmp_path / "texts.txt").write_text("a text\n")
    words = ["--model.name", saved_encoder(tmp_path / "model"), "--model.attention", "flash_attention_2"]
    output = ["--data.input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "x.npy")]
    assert cli.main(["encode", *words, *output]) == 2
    assert "model.attention flash_attention_2 needs the package flash-attn" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    code = "import sys; from raoe_train.cli import main; sys.exit(main(['--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


PAGE = Path(__file__).parents[2] / "docs" / "reproduce.md"
BLOCKS = re.sub(r" *\\\n +", " ", PAGE.read_text(encoding="utf-8"))
COMMANDS = [line.partition(" #")[0].split() for line in BLOCKS.splitlines() if line.startswith("    raoe-train ")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: "-".join(words[1:3]))
def test_the_commands_of_a_page_are_understood(command):
    """The job, its recipe and every key; nothing is run."""
    _, job, *rest = command
    recipe = rest.pop(0) if not rest[0].startswith("--") and job not in cli.WORDS else None
    named = [f"--{cli.WORDS[job]}"] if job in cli.WORDS else []
    cli.load(job, recipe, cli.parse_options([*named, *rest]))


def test_help_lists_jobs_and_keys(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "train" in text and "raoe-s1" in text
    assert cli.main(["train", "raoe-s1", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--loss.mini_batch_size" in text and "--model.scratch.layers" in text


def test_run_is_the_same_from_python():
    assert raoe_train.run is cli.run
    with pytest.raises(ValueError, match="unknown job 'mines'"):
        raoe_train.run("mines")
    with pytest.raises(AttributeError):
        _ = raoe_train.nothing


def test_the_command_is_light():
    """No seconds of imports before an error can be shown."""
    command = [sys.executable, "-X", "importtime", "-m", "raoe_train"]
    for words, status in ((["--help"], 0), (["train", "no-such-recipe"], 2)):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == status
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "raoe_train.cli" in imported
        assert not {"torch", "sentence_transformers", "transformers", "datasets"} & imported


def test_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "raoe_train", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown job" in done.stderr
