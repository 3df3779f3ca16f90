"""Reading damaged variants of valid files: some of the cases of ``python -m tests.fuzz``."""

from __future__ import annotations

from tests.fuzz.__main__ import tried
from tests.fuzz.tables import TABLES

CASES = 2000


def test_reading_is_correct_or_a_clear_error():
    counts, bad = tried(CASES, seed=0)
    assert not bad
    for kind in TABLES:  # some are refused and some accepted
        assert counts[kind, "rows"] > 20 and counts[kind, "error"] > 15
