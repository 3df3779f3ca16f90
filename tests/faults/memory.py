"""``python -m tests.faults.memory [--steps 10000] [--chains 10000] [--jobs …]``: whether memory stays flat.

Each job is a process, whose resident memory is sampled. Its mean in the last quarter of its time may be at most
2 % above that in the second: in the first, libraries are imported and buffers grow to their size.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.decoders import saved_decoder
from tests.forked import context
from tests.tiny import SENTENCES
from tests.training.small_runs import SCRATCH, write_pairs

MOST = 0.02
EVERY = 0.1  # seconds


def jobs(folder: Path, steps: int, chains: int) -> dict[str, dict[str, Any]]:
    """{job: its recipe}, with their inputs written to a folder."""
    texts = folder / "texts.txt"
    texts.write_text("".join(f"{SENTENCES[n % 11]} {n}\n" for n in range(chains)))
    return {
        "train": {
            "model": {"name": "scratch", "device": "cpu", "max_seq_length": 16, "scratch": SCRATCH},
            "data": {"train": [write_pairs(folder / "train.tsv", rows=400)]},
            "training": {"max_steps": steps, "per_device_train_batch_size": 8, "save_strategy": "no",
                         "logging_steps": 100},
            "output": str(folder / "run"),
        },
        "generate": {
            "model.name": saved_decoder(folder), "model.device": "cpu", "data.input": str(texts),
            "output": str(folder / "chains.jsonl"),
            "generation": {"steps": 2, "max_new_tokens": 3, "verify": False, "batch_size": 64,
                           "prompt": "Again: {sentence} ->"},
        },
    }  # fmt: skip


def sampled(job: str, recipe: dict[str, Any], log: Path) -> list[int]:
    """Resident bytes of a process that does a job, sampled from its start to its end."""
    process = context().Process(target=_do, args=(job, recipe, str(log)))
    process.start()
    pages, found = Path(f"/proc/{process.pid}/statm"), []
    while process.is_alive():
        if fields := pages.read_text().split():
            found.append(int(fields[1]) * os.sysconf("SC_PAGE_SIZE"))
        process.join(EVERY)
    assert process.exitcode == 0, log.read_text(encoding="utf-8", errors="replace")[-3000:]
    return [size for size in found if size]


def growth(sizes: list[int]) -> float:
    """The mean of the last quarter above that of the second, as a share of it."""
    quarter = len(sizes) // 4
    return float(np.mean(sizes[-quarter:]) / np.mean(sizes[quarter : 2 * quarter]) - 1)


def _do(job: str, recipe: dict[str, Any], log: str) -> None:
    from raoe_train.cli import run

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    run(job, None, **recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of the training")
    parser.add_argument("--chains", type=int, default=10_000, help="to generate")
    parser.add_argument("--jobs", nargs="*", choices=["train", "generate"], default=["train", "generate"])
    chosen = parser.parse_args()
    leaks = 0
    with tempfile.TemporaryDirectory() as made:
        recipes = jobs(Path(made), chosen.steps, chosen.chains)
        for name in chosen.jobs:
            began = time.perf_counter()
            sizes = sampled(name, recipes[name], Path(made) / f"{name}.log")
            grown = growth(sizes)
            leaks += grown > MOST
            quarters = ", ".join(f"{np.mean(part) / 1e6:.1f}" for part in np.array_split(sizes, 4))
            said = f"{name}: MB by quarters {quarters}; grown by {100 * grown:.2f} %"
            print(f"{said} ({len(sizes)} samples, {time.perf_counter() - began:.0f} s)", flush=True)
    return bool(leaks)


if __name__ == "__main__":
    sys.exit(main())
