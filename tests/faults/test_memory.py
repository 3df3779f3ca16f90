"""What of resident memory is called growth: a part of ``python -m tests.faults.memory``."""

from __future__ import annotations

import pytest

from tests.faults.memory import MOST, growth


def test_growth_is_of_the_last_quarter_above_the_second():
    assert growth([1, 1, 100, 100, 7, 7, 100, 100]) == 0  # a start and a peak between do not count
    assert MOST < growth([0, 0, 100, 100, 0, 0, 103, 103]) == pytest.approx(0.03)
    assert growth([0, 200, 200, 100]) == -0.5
