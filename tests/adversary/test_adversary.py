"""Invalid commands, and calls in Python, end with a one-sentence error: some cases of ``python -m tests.adversary``."""

import pytest

from tests.adversary.__main__ import KINDS, sample, tried

CASES = 250


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_one_sentence(kind):
    counts, bad = tried(sample(CASES, 0, kind))
    assert not bad and counts["error"] >= CASES * (1 if kind == "commands" else 0.7)
