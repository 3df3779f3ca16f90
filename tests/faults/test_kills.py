"""Every resumable job, killed a few times. KILLS=20 kills each 20 times; FAULTS_SEED sets the seed."""

import os
from pathlib import Path

import pytest

from raoe_train import outputs, run
from tests.faults.kills import disturbed
from tests.faults.small_jobs import make_jobs

SHORTER = ("mine", "evaluate", "encode", "export", "prepare")
KILLS, SEED = int(os.environ.get("KILLS", "3")), int(os.environ.get("FAULTS_SEED", "0"))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return make_jobs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * KILLS)
@pytest.mark.parametrize("name", ["train", "score", "generate", *SHORTER])
def test_killed_job_resumes_to_equal_output(jobs, tmp_path, name):
    tally = disturbed(jobs[name], tmp_path / "outputs", KILLS, SEED)
    assert sum(tally.kills.values()) == KILLS and tally.finished >= 1
    print(f"{name}: {dict(tally.kills)}, {tally.finished} outputs, {dict(tally.places)}")


@pytest.mark.parametrize(
    ("name", "more"), [("encode", {}), ("mine", {"loss": "mse", "mining": {"count": 20}})], ids=["encode", "mine"]
)
def test_output_without_summary_is_recognised(jobs, tmp_path, name, more, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {**jobs[name].keys(tmp_path), **more}

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(outputs.Output, "finish", killed)
        run(name, **keys)
    output = Path(keys["output"])
    written = output.read_bytes()
    run(name, **keys)
    assert output.read_bytes() == written and outputs.beside(output, ".json").exists()
    assert not outputs.beside(output, ".parts").exists()
