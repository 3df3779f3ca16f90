"""`make gpu`: on a machine with a GPU and without a network, build in place, run every GPU test, then every benchmark,
then the tests of training.

Writes GPU-COMMIT.jsonl (one line a test run and benchmark row) and GPU-COMMIT.md (what was printed) into
benchmarks/results or wherever --results says, and there the ledger in README.md. Where a command may not take as long
as all of it, name parts, one call each: build, tests, ops, then train. No speed is measured on a red tree.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import gate, ledger, provenance
from benchmarks.__main__ import KERNEL_OPS, OPS

PARTS = ("build", "tests", *OPS, "train")
LEDGER = (*OPS, "train")
# What compiles for GPUs that are not there needs none, and CI runs it.
TRAIN = "-m pytest -q tests/encoders/test_gpu_decoders.py -p no:cacheprovider".split()
TESTS = "-m pytest -q tests/kernels --ignore tests/kernels/test_triton_compile.py -p no:cacheprovider".split()
# Kernels are compiled when they first run, one process one at a time: most of what the tests take.
TEST_PROCESSES = 4


def test_command() -> list[str]:
    """With what there is: neither plugin is among what a GPU machine must have."""
    command = [*TESTS]
    if find_spec("pytest_timeout"):
        command += ["--timeout", "400"]
    if find_spec("xdist"):
        command += ["-n", str(TEST_PROCESSES)]
    return command


def stream(title: str, command: list[str], log: list[str]) -> int:
    """Run a command, show and keep what it prints and how long it took, give its exit status."""
    print(f"\n== {title}: {' '.join(command)}", flush=True)
    log.append(f"\n## {title}\n\n```\n")
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=provenance.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if process.stdout is not None:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.append(line)
    status = process.wait()
    log.append(f"```\n\nexit {status} after {time.monotonic() - start:.0f} s\n")
    print(log[-1].strip("`\n"), flush=True)
    return status


def run(parts: list[str], results: Path) -> list[str]:
    """Do the parts in their order; the titles of those that failed."""
    about = provenance.describe("cuda")
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", about["gpu"]).strip("-")
    stem = results / f"{gpu}-{about['commit'].replace('+', '-modified')}"
    rows = stem.with_name(stem.name + ".jsonl")
    results.mkdir(parents=True, exist_ok=True)
    log = [f"# {about['gpu']}, commit {about['commit']}, {about['date']}: {' '.join(parts)}\n\n"]
    log.append("".join(f"- {key}: {value}\n" for key, value in about.items()))
    failed: list[str] = []

    def step(title: str, *command: str) -> bool:
        passed = stream(title, [sys.executable, *command], log) == 0
        if not passed:
            failed.append(title)
        return passed

    try:
        if "build" in parts:
            step("build", "setup.py", "build_ext", "--inplace")
            step("what is here", "-m", "raoe_kernels")
        if "tests" in parts:
            passed = step("tests", *test_command())
            with rows.open("a") as lines:
                for op in KERNEL_OPS:  # the others' own tests run before their benchmarks
                    outcome = {"op": op, "device": "cuda", "tests": "passed" if passed else "failed"}
                    lines.write(json.dumps(outcome | about) + "\n")
                    if passed:
                        gate.remember(op, "cuda")
        ops = [op for op in OPS if op in parts]
        if failed and ops:
            log.append(f"\nNo speed was measured: {', '.join(failed)} failed.\n")
        else:
            for op in ops:
                step(op, "-m", "benchmarks", op, "--device", "cuda", "--json", str(rows))
        if "train" in parts:
            outcome = {"op": "train", "device": "cuda", "tests": "passed" if step("train", *TRAIN) else "failed"}
            with rows.open("a") as lines:
                lines.write(json.dumps(outcome | about) + "\n")
    finally:
        with rows.with_suffix(".md").open("a") as text:
            text.write("".join(log))
        print(f"\nwritten: {stem}.md")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--results", type=Path, default=ledger.RESULTS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown part {unknown.pop()!r}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("make gpu: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        return 1
    failed = run(arguments.parts or list(PARTS), arguments.results)
    if (arguments.results / "README.md").exists():
        ledger.update(LEDGER, arguments.results)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
