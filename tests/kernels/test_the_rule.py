"""The rule that all conformance rests on refuses what is wrong, at the size of roundings."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels.testing import assert_accurate, assert_gradient_accurate, assert_loss_accurate, error

TRUTH = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
EXACT = TRUTH.float()
EPS = torch.finfo(torch.float32).eps
rules = pytest.mark.parametrize("rule", [assert_loss_accurate, assert_gradient_accurate])


@rules
@pytest.mark.parametrize("roundings", [3, 5])
def test_four_roundings_of_the_largest(rule, roundings):
    """Where plain torch is exact: 4 of 2.0 may be between, at any of the elements."""
    off = TRUTH + torch.tensor([0, 0, roundings * 2 * EPS], dtype=torch.float64)
    if roundings < 4:
        rule(off.float(), EXACT, TRUTH)
    else:
        with pytest.raises(AssertionError, match=r"error .* exceeds .* at element 2: kernel 0.5"):
            rule(off.float(), EXACT, TRUTH)


@pytest.mark.parametrize("rule, factor", [(assert_loss_accurate, 2), (assert_gradient_accurate, 3)])
def test_so_many_times_plain_torchs_error(rule, factor):
    plain = TRUTH + 0.1
    rule(TRUTH + 0.1 * factor, plain, TRUTH)
    with pytest.raises(AssertionError, match="exceeds"):
        rule(TRUTH + 0.1 * factor + 1e-6, plain, TRUTH)


@rules
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_so_in_both(rule, bad):
    broken = EXACT.clone()
    broken[1] = bad
    with pytest.raises(AssertionError, match="at element 1"):
        rule(broken, EXACT, TRUTH)
    with pytest.raises(AssertionError, match="at element 1"):  # nor may a number be where the truth has none
        rule(EXACT, broken, broken.double())
    assert error(broken, broken.double()) == 0 and error(broken, TRUTH) == float("inf")


def test_an_exponents_range_is_worth_its_roundings():
    """A range of 100: 4 roundings of 1 + 100 for a gradient, of |L| + 100 for a loss of more than 1."""
    for rule in (assert_loss_accurate, assert_gradient_accurate):
        rule((TRUTH + 390 * EPS).float(), EXACT, TRUTH, 100.0)
        with pytest.raises(AssertionError, match="exceeds"):
            rule((TRUTH + 900 * EPS).float(), EXACT, TRUTH, 100.0)
    with pytest.raises(AssertionError, match="exceeds"):  # a loss moves by less than itself
        small = torch.tensor(1e-6)
        assert_loss_accurate(small + 1e-9, small, small.double(), 100.0)


def test_shapes_are_the_same():
    with pytest.raises(AssertionError, match=r"shape \(3,\) differs from the reference's shape \(1, 3\)"):
        assert_accurate("loss", EXACT, EXACT, TRUTH[None], factor=2.0, floor=1.0)
