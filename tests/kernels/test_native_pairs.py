"""Instructions a pair of the pairwise losses by many blocks, in the code that nvcc makes for sm_90. No GPU."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest

from benchmarks import hot_pairs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed, which brings cuobjdump"),
]
MOST = 150  # 146 of CUDA 13.0's nvcc
TERM = "D::term(Inverse ? -my.c[k] : my.c[k])"


def test_instructions_a_pair():
    found = hot_pairs.instructions()
    assert found.keys + found.hot <= MOST and found.spills == 0


def test_the_gate_sees_exponentials_in_double():
    found = hot_pairs.instructions(TERM, "T(exp2(double(Inverse ? -my.c[k] : my.c[k])))")
    assert found.keys + found.hot > MOST and found.spills > 0
