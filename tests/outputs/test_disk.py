"""Outputs that cannot be written, and full disks: the error message, and the files left behind.

Real here: /dev/full, which refuses every write with ENOSPC, in the place of one file of a checkpoint; a file in the
place of a folder, which stops root too; where mounting is allowed (root, in Linux), a tmpfs that does fill up, and one
that is mounted read-only.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raoe_train import run
from raoe_train.encoders.load import load_encoder
from raoe_train.jobs.check import check_encoder
from raoe_train.settings import Model
from tests.faults.small_jobs import make_jobs
from tests.forked import python
from tests.training.small_runs import saving


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "file",
    [
        "optimizer.pt",
        pytest.param("trainer_state.json", marks=pytest.mark.slow),
        pytest.param("config_sentence_transformers.json", marks=pytest.mark.slow),
    ],
)
def test_full_disk_at_a_checkpoint(tmp_path, file):
    """The checkpoint of step 8 cannot be written; the run resumes from that of step 4."""
    options = saving(tmp_path, 4)
    whole = run("train", "raoe-s1", **saving(tmp_path, 4, output=str(tmp_path / "whole")))
    real = os.makedirs

    def makedirs(name, *arguments, **more):
        if str(name).endswith("checkpoint-8") and not os.path.exists(name):
            Path(name).mkdir(parents=True)
            Path(name, file).symlink_to("/dev/full")
        real(name, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "makedirs", makedirs)
        with pytest.raises(OSError, match=r"the disk is full: .*free some space and run the same command again"):
            run("train", "raoe-s1", **options)
    checkpoints = tmp_path / "out" / "checkpoints"
    last = checkpoints / "checkpoint-4"
    assert check_encoder(load_encoder(Model(name=str(last), device="cpu")))["failed"] == []
    (checkpoints / "checkpoint-8" / file).unlink()  # the disk has room again
    again = run("train", "raoe-s1", **options)
    assert again["steps"] == whole["steps"]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("job", ["train", "score", "generate"])
def test_file_in_place_of_a_folder(tmp_path, capsys, job):
    keys = make_jobs(tmp_path / "inputs")[job].keys(tmp_path / "occupied")
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(OSError, match=r"occupied"):
        run(job, None, **keys)
    assert (tmp_path / "occupied").read_text() == "a file"


PLACES = [("evaluate", "polarity.reference.cache"), ("train", "teacher.cache"), ("mine", "model.cache")]


@pytest.mark.parametrize(("job", "key"), PLACES)
def test_places_are_looked_at_before_anything_else(tmp_path, monkeypatch, job, key):
    """No model and no data is given, which each job would say first."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x", tmp_path / "file"):
        with pytest.raises(ValueError, match=rf"^{key} {path} cannot be written: .*file is a file"):
            run(job, None, **{key: str(path)})
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root can write everywhere
    with pytest.raises(ValueError, match=rf"^{key} .* cannot be written: {tmp_path} is read-only"):
        run(job, None, **{key: str(tmp_path / "new" / "x")})
    assert os.listdir(tmp_path) == ["file"]


MOUNTING = """
import ctypes, subprocess, sys
from raoe_train.cli import main
from raoe_train.config import to_dict
from tests.tiny import load

folder, options, *sys.argv[1:] = sys.argv[1:]
refused = ctypes.CDLL(None).unshare(0x20000)  # CLONE_NEWNS: mounts that nobody else sees, and that end with us
for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", options, "tmpfs", folder]):
    refused = refused or subprocess.run(["mount", *words]).returncode
if refused:
    sys.exit(77)
"""


def on_a_mount(folder, options, code, *words):
    """What `python -c code` does with words, where `folder` is such a tmpfs."""
    folder.mkdir()
    process = python("-c", MOUNTING + code, folder, options, *words)
    if process.returncode == 77:
        pytest.skip("mounting is not allowed here")
    return process


EVERY_JOB = """
from pathlib import Path
from raoe_train import run
from tests.faults.small_jobs import make_jobs

for name, job in make_jobs(Path(sys.argv[1])).items():
    try:
        run(job.name, None, **job.keys(Path(sys.argv[2], name)))
        print("job", name, "wrote")
    except OSError as error:
        print("job", name, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "said"), [("ro", "Read-only file"), ("size=8k", "the disk is full: cannot write")])
def test_every_job_on_a_real_file_system(tmp_path, options, said):
    mounted = tmp_path / "mounted"
    process = on_a_mount(mounted, options, EVERY_JOB, tmp_path / "inputs", mounted)
    assert process.returncode == 0, process.stderr
    results = [line.removeprefix("job ") for line in process.stdout.splitlines() if line.startswith("job ")]
    assert len(results) == 9
    assert all(said in line and f"{mounted}/" in line for line in results), results
