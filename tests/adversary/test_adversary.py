"""Invalid commands end with a one-sentence error: some of the cases of ``python -m tests.adversary``."""

from __future__ import annotations

from tests.adversary.__main__ import sample, tried
from tests.adversary.cases import right

CASES = 300


def test_every_error_is_one_sentence():
    counts, bad = tried(sample(CASES, seed=0))
    assert not bad and counts["error"] + counts["right"] == CASES


def test_unusual_valid_input_works():
    counts, bad = tried(list(right())[::8])
    assert not bad and counts["right"] > 15
