"""A few cases of ``python -m tests.sanitizers``, with small blocks and the baseline instruction set."""

import shutil

import pytest

from tests.sanitizers.__main__ import fuzzed


@pytest.mark.slow
@pytest.mark.parametrize("which", [["asan", "ubsan"], ["tsan"]], ids="+".join)
def test_any_argument_by_any_number_of_threads(which):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert fuzzed(which, cases=300, seed=0, sizes=[True], simd=False)
