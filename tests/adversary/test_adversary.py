"""Commands that cannot end well end in a sentence: a part of what ``python -m tests.adversary`` tries."""

from __future__ import annotations

from tests.adversary.__main__ import sample, tried

CASES = 300


def test_every_error_is_a_sentence():
    counts, bad = tried(sample(CASES, seed=0))
    assert not bad and counts["error"] == CASES
