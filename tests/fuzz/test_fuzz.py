"""Some of the cases of ``python -m tests.fuzz``, and a few steps of the state machines of machines.py. STEPS sets the
number of steps, FUZZ_SEED the seed."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.__main__ import tried
from tests.fuzz.machines import MACHINES, driven
from tests.fuzz.tables import TABLES

CASES = 2000
STEPS, SEED = int(os.environ.get("STEPS", "12")), int(os.environ.get("FUZZ_SEED", "0"))


def test_reading_ends_in_rows_or_a_clear_error():
    counts, bad = tried(CASES, SEED)
    assert not bad
    for kind in TABLES:  # some are refused and some accepted
        assert counts[kind, "rows"] > 20 and counts[kind, "error"] > 15


@pytest.mark.timeout(120 + STEPS)
@pytest.mark.parametrize("name", list(MACHINES))
def test_random_operations_keep_results_valid(tmp_path, name):
    driven(name, tmp_path, SEED, STEPS)
