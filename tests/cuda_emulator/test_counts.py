"""Operations on the stream and bytes a pair of the pairwise losses in CUDA C++, by the emulator's counters."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.cuda_emulator import counted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]
PAIRS = 20_000  # more than one block's, and no multiple of a tile
OPERATIONS, BYTES = 14, 180


def too_much(operations: list[counted.Operation], pairs: int) -> list[str]:
    found = []
    moved = sum(each.read + each.written for each in operations) / pairs
    if len(operations) > OPERATIONS:
        found.append(f"{len(operations)} operations: {', '.join(each.name for each in operations)}")
    if moved > BYTES:
        found.append(f"{moved:.0f} bytes a pair")
    return found


def test_one_block_is_one_launch():
    (only,) = counted.pairwise(512)
    # Similarity, score and label in, a gradient and one loss out.
    assert only.read == 512 * (4 + 4 + 8) and only.written == 512 * 4 + 4


def test_many_pairs():
    assert too_much(counted.pairwise(PAIRS), PAIRS) == []


def test_the_gate_sees_a_longer_sort():
    """Keys of 64 bits take eight passes where those of 32 take four."""
    narrow, wide = counted.pairwise(PAIRS), counted.pairwise(PAIRS, torch.float64)
    passes = [sum(each.name == "radix sort: pass" for each in found) for found in (narrow, wide)]
    assert passes == [4, 8] and len(too_much(wide, PAIRS)) == 2
