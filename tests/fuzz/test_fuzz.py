"""Some of the cases of ``python -m tests.fuzz``. FUZZ_SEED sets the seed."""

import os

from tests.fuzz.__main__ import tried
from tests.fuzz.tables import TABLES

CASES = 2000
SEED = int(os.environ.get("FUZZ_SEED", "0"))


def test_reading_ends_in_rows_or_a_clear_error():
    counts, bad = tried(CASES, SEED)
    assert not bad
    for kind in TABLES:  # some are refused and some accepted
        assert counts[kind, "rows"] > 20 and counts[kind, "error"] > 15
