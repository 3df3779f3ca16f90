"""Invalid commands end with a one-sentence error: some of the cases of ``python -m tests.adversary``."""

from __future__ import annotations

from tests.adversary.__main__ import sample, tried

CASES = 300


def test_every_error_is_one_sentence():
    counts, bad = tried(sample(CASES, seed=0))
    assert not bad and counts["error"] == CASES
