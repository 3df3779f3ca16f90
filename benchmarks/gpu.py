"""`make gpu`: on a machine with a GPU and without a network, build in place, run every GPU test, then every benchmark.

Writes GPU-COMMIT.jsonl (benchmark rows) and GPU-COMMIT.md (what was built, what passed, the tables) into
benchmarks/results or wherever --results says. No speed is measured on a red tree.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import gate, provenance
from benchmarks.__main__ import OPS

TESTS = ["-m", "pytest", "-q", "tests/kernels", "-p", "no:cacheprovider", "--timeout", "900"]


def stream(title: str, command: list[str], log: list[str]) -> int:
    """Run a command, show and keep what it prints, give its exit status."""
    print(f"\n== {title}: {' '.join(command)}", flush=True)
    log.append(f"\n## {title}\n\n```\n")
    process = subprocess.Popen(
        command, cwd=provenance.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if process.stdout is not None:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.append(line)
    log.append("```\n")
    return process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--skip-build", action="store_true", help="test and measure what is there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("make gpu: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        return 1
    about = provenance.describe("cuda")
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", about["gpu"]).strip("-")
    stem = arguments.results / f"{gpu}-{about['commit'].replace('+', '-modified')}"
    arguments.results.mkdir(parents=True, exist_ok=True)
    log = [f"# {about['gpu']}, commit {about['commit']}, {about['date']}\n\n"]
    log.append("".join(f"- {key}: {value}\n" for key, value in about.items()))
    failures = []

    def step(title: str, *command: str) -> None:
        if stream(title, [sys.executable, *command], log) != 0:
            failures.append(title)

    try:
        if not arguments.skip_build:
            step("build", "setup.py", "build_ext", "--inplace")
        step("what is here", "-m", "raoe_kernels")
        step("tests", *TESTS)
        if failures:
            log.append(f"\nNo speed was measured: {', '.join(failures)} failed.\n")
        else:
            rows = stem.with_suffix(".jsonl")
            rows.unlink(missing_ok=True)
            for op in OPS:
                gate.remember(op, "cuda")
            step("benchmarks", "-m", "benchmarks", "--device", "cuda", "--json", str(rows))
    finally:
        stem.with_suffix(".md").write_text("".join(log))
        print(f"\nwritten: {stem}.md")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
