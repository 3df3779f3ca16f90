"""A part of ``python -m tests.sanitizers``: small blocks, the baseline's code, few cases; labels, emulated."""

from __future__ import annotations

import shutil

import pytest

from tests.sanitizers.__main__ import ONE_WIDTH, SANITIZERS, conforms, fuzzed


@pytest.mark.slow
@pytest.mark.parametrize("which", [["asan", "ubsan"], ["tsan"]], ids="+".join)
def test_any_argument_by_any_number_of_threads(which):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert fuzzed(which, cases=300, seed=0, sizes=[True], simd=False)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tiles", ["small", "large"])
def test_labels_of_the_emulated_kernels(tiles):
    """Also labels further apart than int64 holds, in one block and in many."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert conforms("emulator", [*SANITIZERS["asan"], *SANITIZERS["ubsan"]], tiles, f"{ONE_WIDTH} and gated")
