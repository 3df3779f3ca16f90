"""Operations on the stream and bytes a pair of the pairwise losses in CUDA C++, by the emulator's counters."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from tests.cuda_emulator import emulate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]
PAIRS = 20_000  # more than one block's, and no multiple of a tile
OPERATIONS, BYTES = 14, 180

FLOAT32 = 2  # csrc/types.h, Float
KEYS = [torch.float32, torch.float64, torch.int64]  # csrc/pairwise/pairwise.h, Key


class Operation(NamedTuple):
    """A launch, a memset or a step of CUB's sort: bytes that it reads and writes at least once, and of a launch its
    blocks and the threads of each."""

    name: str
    read: int
    written: int
    blocks: int
    threads: int


@cache
def module() -> ModuleType:
    folder = tempfile.mkdtemp(prefix="raoe_counting_")
    try:
        return emulate.build(Path(folder), {}, counting=True)
    finally:
        shutil.rmtree(folder)


def on_stream(call: Callable[[], object], *memory: torch.Tensor) -> list[Operation]:
    """What a call does, with bytes of these."""
    module().watch(tuple(number for x in memory for number in (x.data_ptr(), x.nbytes)))
    call()
    done = [line.split(maxsplit=4) for line in module().operations().splitlines()]
    module().watch(())
    return [Operation(name, *map(int, counts)) for *counts, name in done]


@cache
def pairwise(pairs: int, scores: torch.dtype = torch.float32) -> list[Operation]:
    """raoe_loss of as many pairs with three labels and its gradient: both objectives, average ranks."""
    seeded = torch.Generator().manual_seed(pairs)
    similarity, grads = torch.rand(pairs, generator=seeded), torch.empty(pairs)
    given = torch.rand(pairs, generator=seeded).to(scores)
    labels, losses = torch.randint(3, (pairs,), generator=seeded), torch.empty(())
    arguments = (
        similarity.data_ptr(), given.data_ptr(), labels.data_ptr(), pairs, FLOAT32, KEYS.index(scores), 0, True, True,
        False, 20.0, 4, 1.0, 1.0, losses.data_ptr(), grads.data_ptr(),
    )  # fmt: skip
    workspace = torch.empty(module().pairwise_workspace(*arguments) + 256, dtype=torch.uint8)
    start = workspace.data_ptr() + -workspace.data_ptr() % 256
    memory = (similarity, given, labels, losses, grads, workspace)
    return on_stream(lambda: module().pairwise(*arguments, start, 0), *memory)


def too_much(operations: list[Operation], pairs: int) -> list[str]:
    found = []
    moved = sum(each.read + each.written for each in operations) / pairs
    if len(operations) > OPERATIONS:
        found.append(f"{len(operations)} operations: {', '.join(each.name for each in operations)}")
    if moved > BYTES:
        found.append(f"{moved:.0f} bytes a pair")
    return found


def test_one_block_is_one_launch():
    (only,) = pairwise(512)
    # Similarity, score and label in, a gradient and one loss out.
    assert only.read == 512 * (4 + 4 + 8) and only.written == 512 * 4 + 4


def test_many_pairs():
    assert too_much(pairwise(PAIRS), PAIRS) == []


def test_the_gate_sees_a_longer_sort():
    """Keys of 64 bits take eight passes where those of 32 take four."""
    narrow, wide = pairwise(PAIRS), pairwise(PAIRS, torch.float64)
    passes = [sum(each.name == "radix sort: pass" for each in found) for found in (narrow, wide)]
    assert passes == [4, 8] and len(too_much(wide, PAIRS)) == 2
