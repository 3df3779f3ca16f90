"""Several prefix widths at once: pairwise_cosine's dims, and the pair losses of (K, B) similarities."""

import pytest
import torch

from raoe_kernels import pairwise_cosine, raoe_loss
from tests.kernels.pairwise_cases import CASES, EVERY_DTYPE, PARTS
from tests.kernels.test_cosine import agrees_with_the_reference, rows, run
from tests.kernels.test_pairwise_conformance import agrees

SHAPES = [
    ((1, 1), (1,)),
    ((3, 7), (1, 2, 7)),
    ((5, 384), (12, 24, 48, 96, 192, 384)),
    ((4, 385), (7, 40, 300)),  # the rest is in no width
    ((33, 64), (8, 9, 41, 64)),
]
NAMES = ("parts-weights", "parts-label", "cosent-c", "gated-17", "gated-clipped", "rank-scale-1000", "raoe-gate-score")
MIXED = [case for case in PARTS + CASES if case.name.startswith(NAMES)]


@pytest.fixture
def swept(place):
    """(device, backend); the compiled kernels of the cosine run on a CPU only."""
    return place if place != ("cuda", "native") else ("cuda", "auto")


@EVERY_DTYPE
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_cosines_against_the_reference(shape, dims, dtype, swept, poisoned):
    agrees_with_the_reference(shape, dims, dtype, *swept)


def test_each_width_is_a_call_of_its_own(swept):
    device, backend = swept
    a, b = rows((6, 20), torch.float64, device)
    dims = (3, 4, 11, 20)
    c, *grads = run(a, b, backend, dims)
    sums = [torch.zeros_like(x) for x in (a, b)]
    upstream = torch.linspace(-2, 3, 24, dtype=torch.float64, device=device).view(4, 6)
    for k, width in enumerate(dims):
        parts = [x[:, :width].clone().requires_grad_() for x in (a, b)]
        one = torch.nn.functional.cosine_similarity(*parts)
        torch.testing.assert_close(c[k], one.detach())
        for total, gradient in zip(sums, torch.autograd.grad(one, parts, upstream[k]), strict=True):
            total[:, :width] += gradient
    for x, total in zip(grads, sums, strict=True):
        torch.testing.assert_close(x, total)


@EVERY_DTYPE
def test_zero_prefixes_have_similarity_and_gradient_zero(dtype, swept, poisoned):
    """What the first columns' gradient holds is that of the widths in which the row is not zero."""
    device, backend = swept
    a, b = rows((4, 40), dtype, device)
    a[1, :10], b[2] = 0, 0
    if dtype != torch.float16:
        a[3, :10] = 1e-10
    c, grad_a, grad_b = run(a, b, backend, (10, 33))
    dead = [1, 2] + [3] * (dtype != torch.float16)
    assert c[0, dead].eq(0).all() and c[0, 0] != 0 and c[1, 2] == 0 and c[1, [0, 1, 3]].ne(0).all()
    assert grad_a[2].eq(0).all() and grad_b[2].eq(0).all() and grad_a[:, 33:].eq(0).all() and grad_b[:, 33:].eq(0).all()
    upstream = torch.linspace(-2, 3, 8)[5]
    one, other = (x[1:2, :33].clone().requires_grad_() for x in (a, b))
    c = pairwise_cosine(one, other, backend="reference")
    alone = torch.autograd.grad(c, (one, other), upstream[None].to(c))
    for x, expected in zip((grad_a, grad_b), alone, strict=True):
        torch.testing.assert_close(x[1:2, :33], expected)


def test_nan_spoils_the_widths_that_hold_it(swept):
    device, backend = swept
    a, b = rows((3, 8), torch.float32, device)
    a[1, 5] = torch.nan
    c, grad_a, grad_b = run(a, b, backend, (2, 5, 8))
    assert c[2, 1].isnan() and c[:2].isfinite().all() and c[2, [0, 2]].isfinite().all()
    for x in (grad_a, grad_b):
        assert x[1].isnan().all() and x[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("dims", "error"),
    [((), ValueError), (4, TypeError), ((2, 3.0), TypeError), ((True, 3), TypeError), ((4, 2), ValueError),
     ((4, 4), ValueError), ((0, 4), ValueError), ((4, 9), ValueError)],
)  # fmt: skip
def test_wrong_dims(dims, error):
    with pytest.raises(error, match="dims"):
        pairwise_cosine(torch.ones(2, 8), torch.ones(2, 8), dims=dims)


# ---- The pair losses of (K, B) ----


@EVERY_DTYPE
@pytest.mark.parametrize("case", MIXED, ids=lambda c: c.name)
def test_losses_against_the_reference(case, dtype, place, poisoned):
    agrees(case, dtype, place, widths=True)


def test_nan_spoils_its_row_and_a_score_all(place):
    device, backend = place
    c = torch.linspace(-0.9, 0.9, 15, device=device).view(3, 5).clone()
    c[1, 2] = torch.nan
    scores, labels = torch.tensor([3.0, 1, 2, 5, 4], device=device), torch.tensor([0, 2, 1, 0, 1], device=device)
    for parts in (False, True):
        similarity = c.clone().requires_grad_()
        losses = raoe_loss(similarity, scores, labels, margin=0, return_parts=parts, backend=backend)
        losses = torch.stack(losses) if parts else losses[None]
        (grad,) = torch.autograd.grad(losses.sum(), similarity)
        assert losses[:, 1].isnan().all() and grad[1].isnan().all()
        assert losses[:, [0, 2]].isfinite().all() and grad[[0, 2]].isfinite().all()
        scored = raoe_loss(similarity, scores * torch.nan, labels, return_parts=parts, backend=backend)
        scored = torch.stack(scored) if parts else scored
        assert scored.isnan().all() and torch.autograd.grad(scored.sum(), similarity)[0].isnan().all()
