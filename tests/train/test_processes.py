"""``torchrun --nproc-per-node N -m raoe_train JOB``: the result does not depend on N. Real processes, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.faults.small_jobs import make_jobs
from tests.train.test_training import SCRATCH, write_pairs

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def launch(processes: int, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """`words` after `python -m`, by what torchrun is; one process without it."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *(several if processes > 1 else []), "-m", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode == 0) == (expect == 0), done.stdout + done.stderr
    return done


def recipe(folder: Path, name: str, processes: int, **changes) -> tuple[Path, Path]:
    """(recipe, output) of a training run whose global batch is 8, whatever the number of processes, from two sources
    whose scores cannot be compared."""
    sources = [write_pairs(folder / "train.tsv"), write_pairs(folder / "other.tsv", rows=16, scale=500.0)]
    dev = write_pairs(folder / "dev.tsv", rows=24)
    made = {
        "extends": "raoe-s1",
        "model": {"name": "scratch", "device": "cpu", "max_seq_length": 16, "scratch": {**SCRATCH, "dropout": 0.0}},
        "data": {"train": sources, "dev": dev},
        "loss": {"gather_across_devices": True, "scale": 5.0},
        "training": {"epochs": 2, "batch_size": 8 // processes, "learning_rate": 0.01, "logging_steps": 1,
                     "optim": "sgd"},  # Adam makes whole steps of gradients that are rounding errors
        "output": str(folder / name),
    }  # fmt: skip
    for section, values in changes.items():
        made[section] = {**made[section], **values}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(made))
    return path, folder / name


def losses(output: Path) -> list[float]:
    entries = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def test_training_is_of_the_global_batch(tmp_path):
    """One, two, four processes with 8, 4, 2 pairs each, the last with cached gradients: the same losses and weights, up
    to rounding."""
    found = {}
    for processes in (1, 2, 4):
        changes = {"loss": {"mini_batch_size": 1}} if processes == 4 else {}
        path, output = recipe(tmp_path, f"with{processes}", processes, **changes)
        said = launch(processes, "raoe_train", "train", str(path)).stdout
        assert said.count("saved to ") == said.count("40 scored pairs") == 1  # only the first process prints
        metrics = json.loads((output / "metrics.json").read_text())
        assert (metrics["steps"], metrics["processes"]) == (14, processes)
        assert not list(output.glob(".partial*")) and not (output / "checkpoints").exists()
        found[processes] = losses(output), load_file(output / "model.safetensors"), metrics
    expected_losses, expected, before = found.pop(1)
    assert len(expected_losses) == 14
    for listed, weights, metrics in found.values():
        assert listed == pytest.approx(expected_losses, rel=1e-4)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=2e-5)
        assert metrics["before"] == before["before"]
        assert metrics["after"]["spearman"] == pytest.approx(before["after"]["spearman"], abs=0.5)


def test_a_run_that_was_interrupted_goes_on_with_all_processes(tmp_path):
    results = []
    for name in ("whole", "stopped"):
        path, output = recipe(tmp_path, name, 2, training={"save_strategy": "steps", "eval_strategy": "no",
                                                          "save_steps": 3, "epochs": 1})  # fmt: skip
        if name == "stopped":
            code = (
                "import os, raoe_train.training as t; from raoe_train.recipe import load; real = t.log_writer\n"
                "def killer(path):\n"
                "    made = real(path)\n"
                "    def end(self, args, state, control, **more):\n"
                "        if state.global_step == 5: os._exit(9)\n"
                "    type(made).on_step_end = end\n"
                "    return made\n"
                f"t.log_writer = killer\nt.train(load('train', {str(path)!r}))"
            )
            script = tmp_path / "killed.py"
            script.write_text(code)
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, cwd=ROOT, check=False)
            assert done.returncode != 0 and (output / "checkpoints" / "checkpoint-3").is_dir()
        said = launch(2, "raoe_train", "train", str(path)).stdout
        assert said.count("going on from") == (name == "stopped")
        results.append(load_file(output / "model.safetensors"))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_error_is_said_once_and_ends_all(tmp_path):
    path, output = recipe(tmp_path, "out", 2)
    output.mkdir()
    (output / "something").touch()
    done = launch(2, "raoe_train", "train", str(path), expect=2)
    assert done.stderr.count("raoe-train: ") == 1 and "holds no run of ours" in done.stderr


@pytest.mark.parametrize(("name", "processes"), [("score", 4), ("generate", 2)])
def test_shares_are_merged_to_the_same(tmp_path, name, processes):
    job = make_jobs(tmp_path / "inputs")[name]
    results = {}
    for number in (1, processes):
        output = tmp_path / "out"
        output.mkdir()
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job.keys(output)))
        said = launch(number, "raoe_train", name, str(path)).stdout
        assert said.count(f"-> {output}") == 1
        results[number] = job.result(output)
        assert not list(output.glob("*.parts"))
        for file in output.iterdir():
            file.unlink()
        output.rmdir()
    assert results[1] == results[processes]
