"""What must hold of the pairwise losses for any batch at all, tried on batches that hypothesis makes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis")  # a machine that `make gpu` can use need not have it
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raoe_kernels import cosent_loss, gated_angular_loss, rank_margin_loss, raoe_loss
from tests.kernels.conftest import PLACES

relaxed = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


# Triton's interpreter takes up to a second a call: it gets a test with fewer examples, at the end.
QUICK = [place for place in PLACES if place != ("cpu", "triton")]
quick = pytest.mark.parametrize("place", QUICK, indirect=True, ids=[f"{d}-{b}" for d, b in QUICK])


@st.composite
def batches(draw):
    """Similarities and scores from small grids, so that ties of every kind are common."""
    pairs = draw(st.integers(1, 24))
    grid = st.integers(-20, 20).map(lambda k: k / 20)
    c = draw(st.lists(grid, min_size=pairs, max_size=pairs))
    s = draw(st.lists(st.integers(-4, 4), min_size=pairs, max_size=pairs))
    l = draw(st.lists(st.integers(-2, 2), min_size=pairs, max_size=pairs))
    order = draw(st.permutations(range(pairs)))
    return torch.tensor(c, dtype=torch.float64), torch.tensor(s), torch.tensor(l), torch.tensor(order)


def value_and_gradient(function, c):
    c = c.clone().requires_grad_()
    loss = function(c)
    return loss.detach(), torch.autograd.grad(loss, c)[0]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@quick
@given(
    batch=batches(), margin=st.sampled_from([0, 0.5, 1, 3]), ties=st.sampled_from(["average", "min", "max", "dense"])
)
@relaxed
def test_permuting_pairs_permutes_the_gradient(place, batch, margin, ties):
    device, backend = place
    c, s, l, order = (x.to(device) for x in batch)

    def f(order):
        return lambda c: raoe_loss(c, s[order], l[order], margin=margin, ties=ties, backend=backend)

    loss, grad = value_and_gradient(f(slice(None)), c)
    permuted, permuted_grad = value_and_gradient(f(order), c[order])
    close(permuted, loss)
    close(permuted_grad, grad[order])


@quick
@given(batch=batches())
@relaxed
def test_cosent_is_rank_margin_without_a_margin(place, batch):
    device, backend = place
    c, s, l, _ = (x.to(device) for x in batch)
    plain = cosent_loss(c, s, backend=backend)
    for ties in ("average", "min", "max", "dense"):
        close(rank_margin_loss(c, s, margin=0, ties=ties, backend=backend), plain)
    # a gate that everything passes leaves the scores, and constant scores or labels leave nothing
    close(gated_angular_loss(c, s, -s, backend=backend), gated_angular_loss(c, s, None, gate="score", backend=backend))
    close(gated_angular_loss(c, -l, l, backend=backend), gated_angular_loss(c, None, l, gate="label", backend=backend))
    assert gated_angular_loss(c, s, l * 0, backend=backend) == 0
    assert rank_margin_loss(c, s * 0, margin=0, backend=backend) == 0


@given(batch=batches())
@settings(relaxed, max_examples=3)
def test_a_few_of_them_everywhere(place, batch):
    device, backend = place
    c, s, l, order = (x.to(device) for x in batch)
    loss, grad = value_and_gradient(lambda c: raoe_loss(c, s, l, margin=1, backend=backend), c)
    permuted = value_and_gradient(lambda c: raoe_loss(c, s[order] ** 3, l[order], margin=1, backend=backend), c[order])
    close(permuted[0], loss)
    close(permuted[1], grad[order])
