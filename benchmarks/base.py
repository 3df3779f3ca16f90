"""Compare this tree with an older commit: run the same benchmarks of both in turn, in separate processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.provenance import ROOT

ROUNDS = 3


def compare(ops: list[str], device: str, sizes: list[int] | None, reference: str) -> None:
    """Print time at `reference` / time of this tree for each contender of both (above 1: this tree is faster)."""
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "base")
        _git("worktree", "add", "--detach", str(other), reference)
        try:
            subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=other, check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
            times: dict[str, dict[tuple[str, str, str], list[float]]] = {"here": {}, "there": {}}
            trees = [("there", other), ("here", ROOT)]
            for _ in range(ROUNDS):
                trees.reverse()
                for name, tree in trees:
                    for row in _rows(tree, ops, device, sizes, Path(folder, "rows.jsonl")):
                        key = row["op"], row["title"], row["contender"]
                        times[name].setdefault(key, []).append(row["median_s"])
        finally:
            _git("worktree", "remove", "--force", str(other))
    print(f"\n{reference} / this tree, medians of {ROUNDS} runs each")
    for key, here in times["here"].items():
        if there := times["there"].get(key):
            _, title, contender = key
            print(f"  {title:<50} {contender:<34} {statistics.median(there) / statistics.median(here):6.2f}")


def _git(*words: str) -> None:
    subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True)


def _rows(tree: Path, ops: list[str], device: str, sizes: list[int] | None, output: Path) -> list[dict]:
    output.unlink(missing_ok=True)
    words = [*ops, "--device", device, "--json", str(output), "--untested"]
    words += ["--sizes", *map(str, sizes)] if sizes else []
    subprocess.run([sys.executable, "-m", "benchmarks", *words], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in output.read_text().splitlines()]
