"""`make gpu` without a GPU: time limits, failures, finished steps, and one whole run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as suite
from benchmarks import gate, gpu, provenance, report

ROOT = provenance.ROOT
FAKED_GPU = Path(__file__).with_name("faked_gpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A fake GPU name, the requested steps (which are not run), and their outcomes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    describe = provenance.describe
    monkeypatch.setattr(provenance, "describe", lambda device: describe("cpu") | {"gpu": "No GPU (1)"})
    monkeypatch.setattr(gpu.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu, "brought_along", lambda: False)
    asked, outcomes = [], {}

    def stream(self, step):
        asked.append(step)
        return outcomes.get(step.title, "passed"), 1.0

    monkeypatch.setattr(gpu.Run, "stream", stream)
    return asked, outcomes


def do(folder, *parts, minutes=None, again=False):
    run = gpu.Run(folder, minutes, again)
    finished = all(run.do(part) for part in parts or gpu.PARTS)
    return run, finished


def rows_of(run):
    return report.read([run.rows])


def test_every_part_runs_once_and_builds_for_the_gpu(machine, tmp_path):
    asked, _ = machine
    run, finished = do(tmp_path)
    titles = [step.title for step in asked]
    assert finished and titles[0] == "build" and titles[-1] == "train" and len(titles) == len(set(titles))
    first = titles.index("profile")
    assert titles[first : first + 5] == ["profile", "train_step 512", "trainer", "lora", "smoke"]
    assert sum(gpu.LIMITS.values()) <= 600 and [step.limit for step in asked if step.title in suite.FIRST] == [
        gpu.LIMITS[op] for op in suite.FIRST
    ]
    for op in [op for op in suite.OPS if op not in suite.FIRST]:
        sizes = [f"{op} {size}" for size in suite.declared(op).SIZES["cuda"]]
        later = [title for title in titles[first + 5 :] if title.split()[0] == op]
        assert later == [title for title in sizes if title != "train_step 512"]
        assert titles.index(f"test-{op}") < titles.index(later[0])
    assert run.rows.name.startswith("No-GPU-1-")
    assert run.environment["RAOE_KERNELS_BUILD"] == "cuda"
    assert run.environment["RAOE_KERNELS_CUDA_ARCHS"] == os.environ.get("RAOE_KERNELS_CUDA_ARCHS", "90")


def test_every_kernel_test_has_a_part():
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/kernels").glob("test_*.py")}
    listed = [file for op in suite.KERNEL_OPS for file in gpu.tests_of(op)]
    assert set(listed) == {file for file in files if "test_triton_" not in file} and len(listed) == len(set(listed))
    assert "tests/kernels/test_dispatch.py" in gpu.tests_of("pairwise")
    assert "tests/kernels/test_gpu_infonce.py" in gpu.tests_of("infonce")


def test_stopped_run_resumes(machine, tmp_path):
    asked, outcomes = machine
    outcomes |= {"cosine 512": "stopped", "test-cosine": "failed"}
    parts = "test-pairwise", "test-cosine", "cosine"
    run, finished = do(tmp_path, *parts)
    assert not finished and [step.title for step in asked][-2:] == ["cosine 64", "cosine 512"]
    assert "tests" in rows_of(run)[0] and "tests" not in rows_of(run)[-1]
    asked.clear()
    outcomes.clear()
    with run.rows.open("a") as rows:
        rows.write('{"step": "cosine 512", "outco')  # killed as it wrote
    _, finished = do(tmp_path, *parts)
    assert finished and [step.title for step in asked] == [
        "cosine 512",
        "cosine 8192",
        "cosine 65536",
        "cosine 1048576",
    ]
    asked.clear()
    do(tmp_path, *parts)
    assert asked == []
    do(tmp_path, "test-cosine", again=True)
    assert [step.title for step in asked] == ["test-cosine"]


def test_failed_tests_hide_ratios_of_their_op_only(machine, tmp_path):
    asked, outcomes = machine
    outcomes |= {"test-cosine": "failed", "build": "failed"}
    run, finished = do(tmp_path)
    assert finished and len(asked) > 30, "nothing is skipped for it"
    for step in asked:
        comes_first = step.op in suite.FIRST or step.title == "train_step 512"
        assert ("--untested" in step.arguments) == (comes_first or (step.op == "cosine" and not step.tests))
    assert [row["op"] for row in rows_of(run) if row.get("tests") == "failed"] == ["cosine"]
    assert gate.passes("pairwise", ["no such file"], "cuda"), "its tests have passed here"
    # earlier failures still count
    assert [title for title, outcome in do(tmp_path)[0].outcomes.items() if outcome == "failed"] == [
        "build",
        "test-cosine",
    ]


def test_output_of_a_step_is_streamed_and_stopped_in_time(machine, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(provenance, "describe", lambda device: {"gpu": "none", "commit": "abc"})
    monkeypatch.setattr(gpu.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu, "TO_STOP", 1.0)
    run = gpu.Run(tmp_path, None, False)
    lines = (
        "import time; print('first', flush=True); shown = lambda: open({!r}).read().count('first'); "
        "[time.sleep(0.05) for _ in range(400) if shown() < 3]; print(shown())"
    )
    assert run.stream(gpu.Step("quick", ["-c", lines.format(str(run.log))], "op"))[0] == "passed"
    # twice in the command, once as it was printed
    assert "first\n3\n```\n\npassed, exit 0" in run.log.read_text()
    assert run.stream(gpu.Step("broken", ["-c", "raise SystemExit(3)"], "op"))[0] == "failed"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    monkeypatch.setattr(gpu.Run, "left", lambda self: 0.5)
    outcome, seconds = run.stream(gpu.Step("endless", ["-c", child], "op"))
    assert outcome == "stopped" and seconds < 30
    assert run.stream(gpu.Step("limited", ["-c", child], "op", limit=0.3))[0] == "over its limit"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert run.stream(gpu.Step("stubborn", ["-c", stubborn], "op"))[0] == "stopped"


def faked(tmp_path, *command, **environment):
    known = {key: value for key, value in os.environ.items() if not key.startswith(("RAOE_", "PYTEST_"))}
    known |= {
        "PYTHONPATH": os.pathsep.join([str(FAKED_GPU), str(ROOT)]),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    known |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "FAKED_BUILD": "0", "RAOE_COMMIT": "abc"} | environment
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=known, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_run_on_a_faked_gpu(tmp_path):
    """Tests are only collected. Every benchmark runs, with every contender available on this machine."""
    command = ["-m", "benchmarks.gpu", "--results", str(tmp_path / "results")]
    process = faked(tmp_path, *command, PYTEST_ADDOPTS="--collect-only -q")
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-3000:]
    (lines,) = (tmp_path / "results").glob("Faked-GPU-abc.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {row["outcome"] for row in rows if "outcome" in row} == {"passed"}
    assert {row["op"] for row in rows if "median_s" in row} == set(suite.OPS)
    assert not [row for row in rows if row.get("failed")]
    missing = {row["contender"]: row["missing"] for row in rows if "missing" in row}
    assert "inf_cl" in missing["Inf-CL flash loss"]
    steps = {row["contender"]: row for row in rows if row["op"] == "train_step" and "median_s" in row}
    assert steps["packed, bf16"]["operations"] < steps["by length, bf16"]["operations"]
    assert {row["most_pairs"] for row in rows if row["op"] == "lora" and "median_s" in row} == {32}
    assert all(row["changed"] == 0 for row in rows if "changed" in row)
    log = lines.with_suffix(".md").read_text()
    assert "not here: bitsandbytes, cut_cross_entropy, faiss, " in log and "failed: nothing\n" in log
    assert "test_gpu_pairwise.py" in log and "Backends on cuda" in log
    again = faked(tmp_path, *command, PYTEST_ADDOPTS="--collect-only -q")
    assert again.returncode == 0 and "## what is here" in again.stdout and "## test-" not in again.stdout
