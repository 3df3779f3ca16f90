"""Several prefix widths at once: pairwise_cosine's dims, and the pair losses of (K, B) similarities."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import pairwise_cosine, raoe_loss
from raoe_kernels.testing import (
    GRADIENT_FACTOR,
    LOSS_FACTOR,
    ULPS,
    assert_accurate,
    assert_gradient_accurate,
    assert_loss_accurate,
)
from tests.kernels.pairwise_cases import CASES, DTYPES, PARTS
from tests.kernels.test_cosine import rows

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


def run(a, b, dims, backend):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    c = pairwise_cosine(a, b, dims=dims, backend=backend)
    upstream = torch.linspace(-2, 3, c.numel(), dtype=c.dtype, device=c.device).view(c.shape)
    return c.detach(), *torch.autograd.grad(c, (a, b), upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_cosines_against_the_reference(shape, dims, dtype, swept, poisoned):
    device, backend = swept
    given = rows(shape, dtype, device)
    kept = [x.clone() for x in given]
    ours = run(*given, dims, backend)
    plain = run(*rows(shape, dtype, "cpu"), dims, "reference")
    truth = run(*(x.double() for x in rows(shape, dtype, "cpu")), dims, "reference")
    assert ours[0].shape == (len(dims), shape[0])
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours[1].dtype == ours[2].dtype == dtype
    shortest = min(x.double()[:, : dims[0]].norm(dim=1).min().item() for x in rows(shape, dtype, "cpu"))
    for name, factor, x, p, t in zip(
        ("c", "grad a", "grad b"), (LOSS_FACTOR, GRADIENT_FACTOR, GRADIENT_FACTOR), ours, plain, truth, strict=True
    ):
        floor = ULPS * torch.finfo(x.dtype).eps * (1.0 if name == "c" else max(3 / shortest, t.abs().max().item()))
        assert_accurate(name, x, p, t, factor=factor, floor=floor)
    assert all(torch.equal(x, y) for x, y in zip(given, kept, strict=True)), "inputs were modified"


def test_each_width_is_a_call_of_its_own(swept):
    device, backend = swept
    a, b = rows((6, 20), torch.float64, device)
    dims = (3, 4, 11, 20)
    c, *grads = run(a, b, dims, backend)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_zero_prefixes_have_similarity_and_gradient_zero(dtype, swept, poisoned):
    """What the first columns' gradient holds is that of the widths in which the row is not zero."""
    device, backend = swept
    a, b = rows((4, 40), dtype, device)
    a[1, :10], b[2] = 0, 0
    if dtype != torch.float16:
        a[3, :10] = 1e-10
    c, grad_a, grad_b = run(a, b, (10, 33), backend)
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
    c, grad_a, grad_b = run(a, b, (2, 5, 8), backend)
    assert c[2, 1].isnan() and c[:2].isfinite().all() and c[2, [0, 2]].isfinite().all()
    for x in (grad_a, grad_b):
        assert x[1].isnan().all() and x[[0, 2]].isfinite().all()


def test_no_pairs(swept):
    device, backend = swept
    none = torch.zeros(0, 4, device=device, requires_grad=True)
    c = pairwise_cosine(none, none, dims=(2, 4), backend=backend)
    c.sum().backward()
    assert c.shape == (2, 0) and none.grad.shape == (0, 4)


@pytest.mark.parametrize(
    ("dims", "error"),
    [((), ValueError), (4, TypeError), ((2, 3.0), TypeError), ((True, 3), TypeError), ((4, 2), ValueError),
     ((4, 4), ValueError), ((0, 4), ValueError), ((4, 9), ValueError)],
)  # fmt: skip
def test_wrong_dims(dims, error):
    with pytest.raises(error, match="dims"):
        pairwise_cosine(torch.ones(2, 8), torch.ones(2, 8), dims=dims)


# ---- The pair losses of (K, B) ----


def similarities(case, dtype, device="cpu"):
    """((3, B), scores, labels): the case's, one that spreads less, and one that spreads far more."""
    c, scores, labels = case.inputs(dtype, device)
    return torch.stack([c, c.flip(0) * 0.5, c * 40]), scores, labels


def losses_and_gradient(case, inputs, backend):
    similarity = inputs[0].clone().requires_grad_()
    result = case.call(similarity, *inputs[1:], backend=backend)
    losses = torch.stack(result) if isinstance(result, tuple) else result[None]
    upstream = torch.linspace(-2.5, 0.7, losses.numel(), dtype=losses.dtype, device=losses.device).view(losses.shape)
    (losses * upstream).sum().backward()
    return losses.detach(), similarity.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", MIXED, ids=lambda c: c.name)
def test_losses_against_the_reference(case, dtype, place, poisoned):
    device, backend = place
    losses, grad = losses_and_gradient(case, similarities(case, dtype, device), backend)
    inputs = similarities(case, dtype)
    truth, true_grad = losses_and_gradient(case, (inputs[0].double(), *inputs[1:]), "reference")
    plain, plain_grad = losses_and_gradient(case, inputs, "reference")
    assert losses.shape == truth.shape and losses.shape[1:] == (3,) and grad.shape == inputs[0].shape
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and grad.dtype == dtype
    for k in range(3):
        exponents = case.exponent_range(inputs[0][k], truth[:, k])
        for part in range(len(truth)):
            assert_loss_accurate(losses[part, k], plain[part, k], truth[part, k], exponents)
        assert_gradient_accurate(grad[k], plain_grad[k], true_grad[k], exponents)


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


@pytest.mark.parametrize("shape", [(2, 0), (1, 1), (3, 1)])
def test_too_few_pairs(shape, place, poisoned):
    device, backend = place
    c = torch.full(shape, 0.5, device=device, requires_grad=True)
    scores, labels = torch.ones(shape[1], device=device), torch.zeros(shape[1], dtype=torch.long, device=device)
    for parts in (False, True):
        losses = raoe_loss(c, scores, labels, return_parts=parts, backend=backend)
        losses = losses[0] + losses[1] if parts else losses
        (grad,) = torch.autograd.grad(losses.sum(), c)
        assert losses.shape == shape[:1] and losses.eq(0).all() and grad.shape == shape and grad.eq(0).all()
