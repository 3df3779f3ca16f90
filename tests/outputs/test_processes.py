"""``torchrun --nproc-per-node N -m raoe_train JOB`` and ``accelerate launch``: the result does not depend on N.

Real processes, over gloo; "by hand" they have what torchrun tells them, and are forked."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.faults.small_jobs import make_jobs
from tests.forked import ROOT, Python, python
from tests.tiny import saved_encoder
from tests.training.small_runs import KILLED, SCRATCH, write_pairs

PAGE = ROOT / "docs/scale.md"
REAL = ("torchrun", "accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def port() -> str:
    """Return a port that is free now."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return str(held.getsockname()[1])


def launchers(by: str, processes: int) -> list[tuple[list[str], dict[str, str]]]:
    """(words before those of a single process, environment) of what has to be started for so many processes."""
    if processes == 1:
        return [([], {})]
    run = ["-m", "torch.distributed.run", "--nproc-per-node"]
    if by == "torchrun":
        return [([*run, str(processes), "--standalone"], {})]
    if by == "accelerate":
        # --multi_gpu makes accelerate behave like torchrun; the recipe sets cpu
        words = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
        words += "--num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0".split()
        return [(words, {})]
    at = port()
    if by == "nodes":  # one process on each
        words = [*run, "1", "--nnodes", str(processes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{at}"]
        return [([*words, "--rdzv-id", "raoe"], {}) for _ in range(processes)]
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": at}
    return [([], {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}) for number in range(processes)]


def launch(
    processes: int, *words: str, by: str = "hand", expect: int = 0, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """`words` after `python` in several processes; the outputs of all, one after another."""
    started = [
        Python(*before, *words, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        for before, environment in launchers(by, processes)
    ]
    try:
        ended = [one.end(seconds) for one in started]
    finally:
        for one in started:
            one.kill()
    out, error = ("".join(texts) for texts in zip(*((one.stdout, one.stderr) for one in ended), strict=True))
    done = subprocess.CompletedProcess(words, max(abs(one.returncode) for one in ended), out, error)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def recipe(folder: Path, name: str, processes: int, rows: tuple[int, int] = (40, 16), **changes) -> tuple[Path, Path]:
    """(recipe, output) of a training run whose global batch is 8, whatever the number of processes, from two sources
    whose scores cannot be compared."""
    sources = [write_pairs(folder / "train.tsv", rows[0]), write_pairs(folder / "other.tsv", rows[1], scale=500.0)]
    dev = write_pairs(folder / "dev.tsv", rows=24)
    options = {
        "model": {"name": "scratch", "device": "cpu", "max_seq_length": 16,
                  "scratch": {**SCRATCH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
        "data": {"train": sources, "dev": [dev]},
        "loss": {"gather_across_devices": True, "scale": 5.0},
        "training": {"num_train_epochs": 2, "per_device_train_batch_size": 8 // processes, "learning_rate": 0.01,
                     "logging_steps": 1, "optim": "sgd"},  # Adam makes whole steps of rounding errors
        "output": str(folder / name),
    }  # fmt: skip
    for section, values in changes.items():
        options[section] = {**options.get(section, {}), **values}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(options))
    return path, folder / name


def losses(output: Path) -> list[float]:
    entries = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def trained(folder: Path, processes: int, by: str, **changes) -> tuple[list[float], dict[str, torch.Tensor], dict]:
    """(losses, weights, metrics.json) of a run."""
    path, output = recipe(folder, "run", processes, **changes)
    message = launch(processes, "-m", "raoe_train", "train", str(path), by=by).stdout
    assert message.count("saved to ") == message.count("train.tsv: ") == 1  # only the first process prints
    metrics = json.loads((output / "metrics.json").read_text())
    assert (metrics["steps"], metrics["processes"]) == (14, processes)
    assert not list(output.glob(".partial*")) and not (output / "checkpoints").exists()
    return losses(output), load_file(output / "model.safetensors"), metrics


def test_the_command_line_leaves_the_process_group(tmp_path):
    """gloo's threads sometimes abort a process that ends inside a group."""
    words = ["export", "--model.name", saved_encoder(tmp_path / "model"), "--output", str(tmp_path / "out")]
    code = (
        "import torch.distributed as dist; from raoe_train.cli import main; "
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/group', rank=0, world_size=1); "
        f"assert main({words}) == 0; assert not dist.is_initialized()"
    )
    ended = python("-c", code)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone"), 1, "itself")


@pytest.mark.parametrize(
    ("by", "processes", "mini_batch_size"),
    [
        ("torchrun", 2, None),
        ("hand", 4, 1),
        pytest.param("accelerate", 2, None, marks=pytest.mark.exhaustive),
        pytest.param("nodes", 2, None, marks=pytest.mark.exhaustive),
    ],
)
def test_processes_train_on_the_global_batch(tmp_path, alone, by, processes, mini_batch_size):
    """One, two and four processes with 8, 4 and 2 pairs each, the last with cached gradients, have equal losses and
    weights up to rounding."""
    expected_losses, expected, before = alone
    assert len(expected_losses) == 14
    listed, weights, metrics = trained(tmp_path, processes, by, loss={"mini_batch_size": mini_batch_size})
    assert listed == pytest.approx(expected_losses, rel=1e-4)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=2e-5)
    assert metrics["before"] == before["before"]
    assert metrics["after"]["spearman"] == pytest.approx(before["after"]["spearman"], abs=0.5)


@pytest.mark.parametrize(
    ("processes", "saved", "killed", "sources"),
    # in the first epoch of 7 steps, after its end, in the second; 3 processes: of 6 rows and 9 steps
    [(2, 3, 5, 2), (2, 7, 8, 2), (2, 2, 11, 2), (3, 2, 13, 2), (2, 2, 8, 1)],
)
def test_interrupted_run_resumes_with_all_processes(tmp_path, processes, saved, killed, sources):
    """The weights equal those of an undisturbed run, in whichever epoch it resumes."""
    results, when = [], {"save_strategy": "steps", "eval_strategy": "no", "save_steps": saved}
    for name in ("whole", "stopped"):
        path, output = recipe(tmp_path, name, processes, training=when)
        made = yaml.safe_load(path.read_text())
        made["data"]["train"] = made["data"]["train"][:sources]
        path.write_text(yaml.safe_dump(made))
        if name == "stopped":
            launch(processes, "-c", KILLED, str(path), str(killed), expect=9)
            assert (output / "checkpoints" / f"checkpoint-{saved * ((killed - 1) // saved)}").is_dir()
        message = launch(processes, "-m", "raoe_train", "train", str(path)).stdout
        assert message.count("resuming from") == (name == "stopped")
        results.append((losses(output), load_file(output / "model.safetensors")))
    (expected, weights), (result, rest) = results
    assert result == expected and all(torch.equal(weights[name], rest[name]) for name in weights)


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """(job, processes, launcher) -> result, always in the same folder; results of one process are cached."""
    folder = tmp_path_factory.mktemp("shares")
    jobs, output, path = make_jobs(folder / "inputs"), folder / "out", folder / "job.yaml"

    @cache
    def shares(name: str, processes: int = 1, by: str = "itself") -> object:
        output.mkdir()
        path.write_text(yaml.safe_dump(jobs[name].keys(output)))
        message = launch(processes, "-m", "raoe_train", jobs[name].name, str(path), by=by).stdout
        ends = ("average of all", "wrote ")
        assert sum(any(end in line for end in ends) for line in message.splitlines()) == 1
        result = jobs[name].result(output)
        assert not list(output.glob("*.parts"))
        shutil.rmtree(output)
        return result

    return shares


@pytest.mark.parametrize(
    ("name", "processes", "by"),
    [
        ("score", 4, "hand"),
        ("generate", 3, "hand"),
        ("encode", 3, "hand"),
        ("mine", 3, "hand"),
        ("mine_rows", 2, "hand"),
        ("evaluate", 2, "hand"),
        *(pytest.param(name, 2, by, marks=pytest.mark.exhaustive) for name in ("score", "encode") for by in REAL),
        *(pytest.param("generate", 2, by, marks=pytest.mark.exhaustive) for by in REAL),
    ],
)
def test_shares_of_processes_merge_to_the_result_of_one(shares, name, processes, by):
    assert shares(name) == shares(name, processes, by)


# fewer rows than processes
FEW = {
    "score": ("sentence1\tsentence2\na man walks\ta dog runs\n", {}),
    "encode": ("text\na man walks\n", {}),
    "mine": ("text\tlabel\na man walks\tx\na dog runs\ty\na man runs\tx\n", {"mining": {"k": 1, "threshold": -1}}),
    "mine_rows": ("anchor\tpositive\na man\ta man walks\na dog\ta dog runs\n", {"mining": {"num_negatives": 1}}),
    "evaluate": ("sentence1\tsentence2\tscore\na man\ta dog\t1\na man\ta man walks\t2\n", {}),
}


@pytest.mark.parametrize("name", FEW)
def test_fewer_rows_than_processes(tmp_path, name):
    """Processes without a part wait for the result, which is that of one process."""
    job, results, path = make_jobs(tmp_path / "inputs")[name], [], tmp_path / "job.yaml"
    rows, out = tmp_path / "few.tsv", tmp_path / "out"
    rows.write_text(FEW[name][0])
    for processes in (1, 4):
        out.mkdir()
        keys = {**job.keys(out), **FEW[name][1]}
        keys |= {"tasks": [str(rows)]} if name == "evaluate" else {"data.input": str(rows)}
        path.write_text(yaml.safe_dump(keys))
        launch(processes, "-m", "raoe_train", job.name, str(path), seconds=60)
        results.append(job.result(out))
        shutil.rmtree(out)
    assert results[0] == results[1] and results[0]


# a process that encodes at most as many parts of 16 texts as its fourth argument says, and is then killed; it leaves a
# file with their number; a fifth argument is the only rank that is killed
ENCODE = """
import os, sys
from pathlib import Path
import raoe_train as rt
from raoe_train import outputs, parts
from sentence_transformers import SentenceTransformer

name, recipe, folder, most, *ranks = sys.argv[1:]
count, real = 0, SentenceTransformer.encode

def counted(*arguments, **keywords):
    global count
    if count == int(most) and os.environ.get("RANK") in (ranks or ["0", "1"]):
        os._exit(9)
    count += 1
    return real(*arguments, **keywords)

parts.SHARD, SentenceTransformer.encode = 16, counted
outputs.PATIENCE = parts.PATIENCE = 2 if ranks or most == "1" else 600
rt.run(name, recipe)
Path(folder, os.environ.get("RANK", "0")).write_text(str(count))
"""


@pytest.mark.parametrize("name", ["encode", "mine", "mine_rows", "evaluate"])
def test_processes_encode_parts_of_their_own(tmp_path, name):
    """After a kill, another number of processes goes on."""
    job, results = make_jobs(tmp_path / "inputs")[name], []
    for processes in (1, 3):
        out, counts, path = tmp_path / "out", tmp_path / f"counts{processes}", tmp_path / "job.yaml"
        out.mkdir()
        counts.mkdir()
        path.write_text(yaml.safe_dump(job.keys(out)))
        code = ("-c", ENCODE, job.name, str(path), str(counts))
        if processes == 3:
            shutil.rmtree(tmp_path / "inputs/cache", ignore_errors=True)  # of the reference
            launch(2, *code, "1", expect=9)
        message = launch(processes, *code, "99").stdout
        assert ("resuming after" in message) == (processes == 3)
        encoded = [int(file.read_text()) for file in counts.iterdir()]
        assert len(encoded) == processes and sum(map(bool, encoded)) >= min(processes, 2)
        results.append((sum(encoded), job.result(out)))
        shutil.rmtree(out)
    (whole, expected), (rest, result) = results
    assert result == expected and 0 < whole - rest <= 2  # the parts of the killed processes were not made again


@pytest.mark.parametrize("name", ["encode", "mine_rows", "evaluate"])
def test_the_others_go_on_without_a_killed_process(tmp_path, name):
    """Killed before its first part, where no launcher ends the others: rank 0 makes the parts of rank 1. Without rank
    0, the others stop with an error, and the next run resumes."""
    job, results, path = make_jobs(tmp_path / "inputs")[name], [], tmp_path / "job.yaml"
    for killed in (None, "1", "0"):
        out, counts = tmp_path / "out", tmp_path / f"counts{killed}"
        out.mkdir()
        counts.mkdir()
        path.write_text(yaml.safe_dump(job.keys(out)))
        shutil.rmtree(tmp_path / "inputs/cache", ignore_errors=True)  # of the reference
        code = ("-c", ENCODE, job.name, str(path), str(counts), "0")
        if killed:
            message = launch(3, *code, killed, expect=9, seconds=60).stderr
            assert len(list(counts.iterdir())) == (2 if killed == "1" else 0)
            assert ("rank 0 has ended without writing" in message) == (killed == "0")
        if killed != "1":
            launch(1, *code, "none", seconds=60)
        results.append(job.result(out))
        shutil.rmtree(out)
    assert results[0] == results[1] == results[2]


def test_torchrun_ends_the_others_if_a_process_is_killed(tmp_path):
    job, path = make_jobs(tmp_path / "inputs")["encode"], tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.keys(tmp_path)))
    (tmp_path / "job.py").write_text(ENCODE)
    code = (str(tmp_path / "job.py"), job.name, str(path), str(tmp_path), "0", "1")
    launch(3, *code, by="torchrun", expect=1, seconds=60)
    assert not (tmp_path / "texts.npy").exists()


# a job in which rank 1 is killed once, at its second call of a function
KILLED_ONCE = """
import os, pkgutil, signal, sys
from pathlib import Path
import raoe_train as rt
from raoe_train import outputs, parts

name, recipe, mark, target = sys.argv[1:]
owner, attribute = target.rsplit(".", 1)
owner, calls = pkgutil.resolve_name(owner), 0
real = getattr(owner, attribute)

def counted(*arguments, **keywords):
    global calls
    calls += 1
    if calls == 2 and os.environ["RANK"] == "1" and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **keywords)

parts.SHARD = 16
setattr(owner, attribute, counted)
rt.run(name, recipe)
"""


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("encode", "sentence_transformers:SentenceTransformer.encode"),
        ("train", "raoe_train.training.trainer:Trainer._save_checkpoint"),
    ],
)
def test_torchrun_restarts_a_killed_process(tmp_path, name, target):
    """The result equals that of a run that was not killed."""
    job, results = make_jobs(tmp_path / "inputs")[name], []
    (tmp_path / "job.py").write_text(KILLED_ONCE)
    for restarts in (0, 1):
        out, path, mark = tmp_path / "out", tmp_path / "job.yaml", tmp_path / "mark"
        out.mkdir()
        path.write_text(yaml.safe_dump(job.keys(out)))
        if not restarts:
            mark.touch()
        words = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "--max-restarts",
            str(restarts),
        ]
        words += [str(tmp_path / "job.py"), job.name, str(path), str(mark), target]
        # torchrun would hand the addresses of the killed processes to the restarted ones (torch 2.13)
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        ended = Python(*words, env={**os.environ, **environment}).end(300)
        assert ended.returncode == 0 and mark.exists(), ended.stdout + ended.stderr
        results.append(job.result(out))
        shutil.rmtree(out)
        mark.unlink()
    assert results[0] == results[1]


@pytest.mark.parametrize("folds", [False, True])
def test_a_certificate_does_not_depend_on_the_number_of_processes(tmp_path, folds):
    certificates, code = [], None
    for processes in (1, 2):
        changes = {"evaluation": {"certificate": True, "guard_budget": 200.0}}
        changes |= {"data": {"dev": None, "dev_share": "auto"}} if folds else {}
        path, output = recipe(tmp_path, f"run{processes}", processes, rows=(120 if folds else 40, 40), **changes)
        if code is None:
            code = python("-m", "raoe_train", "train", str(path)).returncode
        else:
            assert launch(processes, "-m", "raoe_train", "train", str(path), expect=code).stdout.count("<- saved") == 1
        certificates.append(json.loads((output / "certificate.json").read_text()))
    one, two = certificates
    both = one["candidates"].keys() & two["candidates"].keys()  # the best step may differ where two are as good
    assert one["saved"] == two["saved"] and len(both) >= 5
    for name in both:
        row = one["candidates"][name]
        for key in ("dev", "guard"):  # of 24 pairs, in which two that change places count
            assert row[key] == pytest.approx(two["candidates"][name][key], abs=5)


ON_NODE = """
import os, sys, time
import raoe_train as rt
from raoe_train.outputs import Output

read = Output.replaces.fget
if os.environ["RANK"] == "1":  # so slow that it would read the record of rank 0 instead of the earlier run's
    Output.replaces = property(lambda output: time.sleep(3) or read(output))
os.chdir(sys.argv[1 + int(os.environ["RANK"])])
rt.train("job.yaml")
"""


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("train.tsv", "rank 1 differs from rank 0 in data.train: all nodes need the same files and settings"),
        ("out", "rank 1 cannot find "),
    ],
)
def test_nodes_that_do_not_share_their_files_are_an_error(tmp_path, differs, message):
    """The folder in which a process starts stands for its node."""
    nodes = [tmp_path / "first", tmp_path / "second"]
    for node, rows in zip(nodes, (40, 41 if differs == "train.tsv" else 40), strict=True):
        node.mkdir()
        path, _ = recipe(node, "job", 2)
        values = yaml.safe_load(path.read_text())
        write_pairs(node / "train.tsv", rows)
        values |= {"data": {"train": ["train.tsv"], "dev": ["dev.tsv"]}, "output": "out"}
        path.write_text(yaml.safe_dump(values))
    if differs == "train.tsv":
        (nodes[0] / "out").mkdir()
        (nodes[1] / "out").symlink_to(nodes[0] / "out")
    ended = launch(2, "-c", ON_NODE, *map(str, nodes), seconds=60, expect=1)
    assert message in ended.stderr and not (nodes[0] / "out" / "metrics.json").exists()


def test_the_slurm_script_of_the_page(tmp_path):
    """With stand-ins for Slurm's commands: two nodes on this machine."""
    [script] = re.findall(r"^```sh\n(#!/bin/bash\n#SBATCH.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    path, output = recipe(tmp_path, "out", 2)
    for old, new in (("RECIPE", str(path)), ("--output DIR", ""), ("29500", port())):
        assert script.count(old) == 1
        script = script.replace(old, new)
    for name, code in (("scontrol", "echo localhost"), ("srun", '"$@" & first=$!; "$@" && wait "$first"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    places = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    slurm = {"SLURM_JOB_NODELIST": "a,b", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7"}
    environment = {
        **os.environ,
        **slurm,
        "PATH": os.pathsep.join(places),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((output / "metrics.json").read_text())["processes"] == 2
