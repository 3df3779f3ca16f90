"""The rule that all conformance rests on refuses what is wrong, at the size of roundings."""

import pytest
import torch

from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate, error

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
