"""Files made from valid ones, and how we read them: a part of what ``python -m tests.fuzz`` tries."""

from __future__ import annotations

from tests.fuzz.__main__ import tried
from tests.fuzz.tables import TABLES

CASES = 2000


def test_reading_is_correct_or_a_clear_error():
    counts, bad = tried(CASES, seed=0)
    assert not bad
    for kind in TABLES:  # neither refuses all, nor takes all
        assert counts[kind, "rows"] > 20 and counts[kind, "error"] > 15
