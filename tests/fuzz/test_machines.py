"""The state machines of machines.py, a few steps each. STEPS sets the number of steps, FUZZ_SEED the seed."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.machines import MACHINES, driven

STEPS, SEED = int(os.environ.get("STEPS", "12")), int(os.environ.get("FUZZ_SEED", "0"))


@pytest.mark.timeout(120 + STEPS)
@pytest.mark.parametrize("name", list(MACHINES))
def test_random_operations_keep_results_valid(tmp_path, name):
    driven(name, tmp_path, SEED, STEPS)
