"""pairwise_cosine: every backend x dtype against the float64 reference, and its edges. Zero rows and NaN:
test_matryoshka.py."""

import pytest
import torch
import torch.nn.functional as F

from raoe_kernels import pairwise_cosine
from raoe_kernels.testing import GRADIENT_FACTOR, LOSS_FACTOR, ULPS, assert_accurate
from tests.kernels.conftest import PLACES, available
from tests.kernels.pairwise_cases import EVERY_DTYPE

SHAPES = [(1, 1), (3, 7), (5, 384), (4, 385), (2, 1500), (33, 64)]


@pytest.fixture(params=[place for place in PLACES if place != ("cuda", "native")], ids="-".join)
def place(request):
    """(device, backend); the compiled kernels run on a CPU only."""
    return available(request.param, "pairwise_cosine")


def rows(shape, dtype, device, seed=0):
    seeded = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=seeded, dtype=torch.float64).to(dtype).to(device) for _ in range(2)]


def run(a, b, backend, dims=None):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    c = pairwise_cosine(a, b, dims=dims, backend=backend)
    upstream = torch.linspace(-2, 3, c.numel(), dtype=c.dtype, device=c.device).view(c.shape)
    return c.detach(), *torch.autograd.grad(c, (a, b), upstream)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_against_the_reference(shape, dtype, place, poisoned):
    agrees_with_the_reference(shape, None, dtype, *place)


def agrees_with_the_reference(shape, dims, dtype, device, backend):
    ours = run(*rows(shape, dtype, device), backend, dims)
    plain = run(*rows(shape, dtype, "cpu"), "reference", dims)
    truth = run(*(x.double() for x in rows(shape, dtype, "cpu")), "reference", dims)
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours[1].dtype == ours[2].dtype == dtype
    narrow = dims[0] if dims else shape[1]
    shortest = min(x.double()[:, :narrow].norm(dim=1).min().item() for x in rows(shape, dtype, "cpu"))
    for name, factor, x, p, t in zip(
        ("c", "grad a", "grad b"), (LOSS_FACTOR, GRADIENT_FACTOR, GRADIENT_FACTOR), ours, plain, truth, strict=True
    ):
        # the roundings are of the terms that cancel (all of them at D = 1): unit rows, times upstream / norm
        floor = ULPS * torch.finfo(x.dtype).eps * (1.0 if name == "c" else max(3 / shortest, t.abs().max().item()))
        assert_accurate(name, x, p, t, factor=factor, floor=floor)


@pytest.mark.parametrize("dtype, low, high", [(torch.float32, 1e-15, 1e18), (torch.float64, 1e-150, 1e150)])
@pytest.mark.parametrize("dims", [None, (7, 64)])
def test_backends_agree_in_the_range_of_the_docstring(dims, dtype, low, high, place):
    device, backend = place
    units = [F.normalize(x, dim=1) for x in rows((5, 64), dtype, device)]
    expected = pairwise_cosine(*units, dims=dims, backend="reference")
    for lengths in ((low, low), (low, high), (high, high)):
        a, b = (x * length for x, length in zip(units, lengths, strict=True))
        a.requires_grad_()
        c = pairwise_cosine(a, b, eps=0, dims=dims, backend=backend)
        torch.testing.assert_close(c, expected)
        (grad,) = torch.autograd.grad(c.sum(), a)
        assert grad.isfinite().all() and grad.abs().max() * lengths[0] > 0.1


@pytest.mark.parametrize("backend", ["reference", "scan", "native"])
def test_equal_rows_have_cosine_1(backend):
    """Exactly: a loss of cosines that are nearly equal multiplies a rounding error by up to 1e4."""
    _, backend = available(("cpu", backend), "pairwise_cosine")
    a, _ = rows((500, 64), torch.float32, "cpu")
    assert all((pairwise_cosine(a, a, dims=dims, backend=backend) == 1).all() for dims in (None, (7, 64)))


def test_where_squares_leave_float32_cpp_sums_doubles():
    _, backend = available(("cpu", "native"), "pairwise_cosine")
    far = (torch.tensor([row]) for row in ([3e20, 4e20], [4e20, 3e20]))
    assert pairwise_cosine(*far, backend=backend).item() == pytest.approx(24 / 25, rel=1e-6)


def test_eps_is_a_bound_on_the_norm(place):
    device, backend = place
    a = torch.tensor([[0.3, 0.4], [0.3, 0.5]], device=device)
    ones = torch.ones(2, 2, device=device)
    c = pairwise_cosine(a, ones, eps=0.51, backend=backend)
    assert c[0] == 0 and c[1] > 0.9
    of_5 = torch.tensor([[3.0, 4.0]], device=device)
    assert pairwise_cosine(of_5, of_5, eps=5.0, backend=backend) == 0


def test_many_aligned_rows(place, monkeypatch, poisoned):
    """A GPU gives each a warp, and a block where rows are few."""
    device, backend = place
    n = 2050
    if backend == "triton":
        n = 9
        monkeypatch.setattr("raoe_kernels.cosine.triton_kernels.FEW", n - 1)
    a, b = rows((n, 400), torch.float32, device)
    truth = run(a.cpu().double(), b.cpu().double(), "reference")
    for x, t in zip(run(a, b, backend), truth, strict=True):
        torch.testing.assert_close(x.cpu().double(), t, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty(shape, place):
    device, backend = place
    a, b = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    c = pairwise_cosine(a, b, backend=backend)
    c.sum().backward()
    assert c.shape == shape[:1] and c.eq(0).all() and a.grad.shape == shape


def test_is_torch_s_cosine_similarity_and_may_be_changed_in_place(place):
    device, backend = place
    a, b = (x.requires_grad_() for x in rows((4, 64), torch.float64, device))
    similarity = pairwise_cosine(a, b, backend=backend)
    torch.testing.assert_close(similarity, F.cosine_similarity(a, b))
    similarity.mul_(20)
    expected = torch.autograd.grad(20 * F.cosine_similarity(a, b).sum(), (a, b))
    for found, wanted in zip(torch.autograd.grad(similarity.sum(), (a, b)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
