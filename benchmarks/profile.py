"""Where the time of a step in bf16 goes, packed and by length: the number of kernels, how long they keep the GPU busy,
and how long the host needs. The longest operations are printed. The step is that of benchmarks/train_step.py."""

from __future__ import annotations

from benchmarks import timing
from benchmarks.case import Case
from benchmarks.equal_lengths import minilm
from benchmarks.train_step import TESTS, batch, contender, counted, drawn

__all__ = ["SIZES", "TESTS", "case"]
SIZES = {"cpu": [64], "cuda": [512]}


def case(pairs: int, device: str) -> Case:
    model, name = minilm(device)
    columns, score = batch(drawn("SNLI", pairs))
    contenders = {way: contender(model, way, "bf16", columns, score) for way in ("packed", "by length")}
    weights = sum(weight.numel() for weight in model.parameters())
    return Case(
        f"SNLI, {pairs:,} pairs, {name}, bf16",
        contenders,
        4 * 8 * weights,
        rounds=8,
        details=lambda way: {**counted(contenders, way), **timing.profiled(contenders[way], device)},
    )
