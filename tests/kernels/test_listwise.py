"""list_mle_loss: against loops and float64, edges, argument errors."""

import itertools
import math

import pytest
import torch

from raoe_kernels import list_mle_loss
from raoe_kernels.listwise import scan
from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.conftest import DEVICES
from tests.kernels.pairwise_cases import EVERY_DTYPE
from tests.kernels.test_guided import tensor

INF, NAN = math.inf, math.nan


@pytest.fixture(params=list(itertools.product(DEVICES, ["reference", "scan"])), ids="-".join)
def place(request):
    return request.param


def lists(shape, dtype=torch.float64, device="cpu", seed=0, spread=1.0, ragged=False):
    """Similarities, a teacher with ties, and a mask with holes or None."""
    seeded = torch.Generator().manual_seed(seed)
    student = spread * (2 * torch.rand(shape, generator=seeded, dtype=torch.float64) - 1)
    teacher = torch.randint(-3, 4, shape, generator=seeded) / 4
    mask = torch.rand(shape, generator=seeded) < 0.7 if ragged else None
    return student.to(dtype).to(device), teacher.to(dtype).to(device), None if mask is None else mask.to(device)


def run(student, teacher, mask=None, backend="scan", upstream=1.0, **options):
    student = student.detach().clone().requires_grad_()
    loss = list_mle_loss(student, teacher, mask=mask, backend=backend, **options)
    return loss.detach(), torch.autograd.grad(loss * upstream, student)[0]


def plackett_luce(scores):
    """- log of the probability that items are drawn one after another in this order, with math alone."""
    total = 0.0
    for k, chosen in enumerate(scores):
        total += math.log(sum(math.exp(x) for x in scores[k:])) - chosen
    return total


def test_list_mle_is_plackett_luce(place):
    device, backend = place
    student, teacher, mask = lists((5, 7), device=device, ragged=True)
    expected = []
    for s, t, m in zip(student.tolist(), teacher.tolist(), mask.tolist(), strict=True):
        items = [(-b, k, 3 * a) for k, (a, b, c) in enumerate(zip(s, t, m, strict=True)) if c]
        expected.append(plackett_luce([x for _, _, x in sorted(items)]))
    loss = list_mle_loss(student, teacher, scale=3, mask=mask, backend=backend)
    assert loss.item() == pytest.approx(sum(expected) / 5, rel=1e-13)


@EVERY_DTYPE
@pytest.mark.parametrize("scale", [1.0, 20.0, 1000.0])
@pytest.mark.parametrize(("shape", "ragged"), [((1, 1), False), ((3, 33), False), ((4, 20), True), ((2, 150), True)])
def test_against_the_reference(shape, ragged, scale, dtype, place, poisoned):
    device, backend = place
    student, teacher, mask = lists(shape, dtype, seed=shape[1], ragged=ragged)
    on_device = [x if x is None else x.to(device) for x in (student, teacher, mask)]
    ours = run(*on_device, backend, upstream=-2.5, scale=scale)
    plain = run(student, teacher, mask, "reference", upstream=-2.5, scale=scale)
    truth = run(student.double(), teacher, mask, "reference", upstream=-2.5, scale=scale)
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours[1].dtype == dtype
    # a list's loss has as many terms as items, and each carries the rounding of its exponent
    exponents = scale * (student.max() - student.min()).item() * shape[1] ** 0.5
    assert_loss_accurate(ours[0], plain[0], truth[0], exponents)
    assert_gradient_accurate(ours[1], plain[1], truth[1], exponents)


def test_a_long_list_keeps_its_digits(place):
    """Running sums of 3,000 items in float32: the rule, not a rule a term."""
    device, backend = place
    if backend == "reference":
        pytest.skip("visits every pair")
    student, _, _ = lists((2, 3000), torch.float32, seed=8)
    teacher = torch.arange(6000.0).remainder(1777).reshape(2, 3000)
    ours = run(student.to(device), teacher.to(device))
    truth = run(student.double(), teacher, backend="scan")
    torch.testing.assert_close(ours[0].cpu().double(), truth[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[1].cpu().double(), truth[1], rtol=2e-5, atol=2e-5 * truth[1].abs().max().item())


@pytest.mark.parametrize("beyond", [-1.0, 1.0])
@pytest.mark.parametrize("ascending", [True, False])
def test_on_both_sides_of_where_exponentials_fit(beyond, ascending, place):
    """Sums of reciprocals are largest where the lowest scores are ranked last, weights smallest where first."""
    device, backend = place
    spread = scan.LINEAR - math.log(40) + beyond
    student = torch.linspace(0, spread, 40, device=device).repeat(2, 1)
    student[1, 3:30] = student[1, 3]  # few at the ends
    teacher = torch.arange(40, device=device).expand(2, 40) * (1 if ascending else -1)
    ours = run(student, teacher, backend=backend, scale=1.0)
    truth = run(student.double(), teacher, backend="reference", scale=1.0)
    torch.testing.assert_close(ours[0].double(), truth[0], rtol=2e-6, atol=0)
    torch.testing.assert_close(ours[1].double(), truth[1], rtol=2e-5, atol=2e-5)


def test_random_ties_shuffle_equals_only(place):
    device, backend = place
    student = tensor([[0.5, -0.3, 0.8, 0.1]], device)
    teacher = tensor([[1.0, 2.0, 1.0, 1.0]], device)
    # the three ways to order the equals 0, 2, 3 that differ in loss: all six, after item 1
    possible = sorted(
        plackett_luce([2 * student[0, k].item() for k in (1, *rest)]) for rest in itertools.permutations((0, 2, 3))
    )
    generator = torch.Generator(device).manual_seed(5)
    options = {"scale": 2, "ties": "random", "backend": backend}
    seen = {round(list_mle_loss(student, teacher, generator=generator, **options).item(), 9) for _ in range(80)}
    assert sorted(seen) == pytest.approx(possible, abs=1e-8)


def test_what_is_masked_has_no_influence(place, poisoned):
    device, backend = place
    student, teacher, mask = lists((4, 9), torch.float32, device, ragged=True)
    mask[1] = False
    loss, grad = run(student, teacher, mask, backend)
    for junk in (NAN, INF, -INF):
        other = run(student.masked_fill(~mask, junk), teacher.masked_fill(~mask, junk), mask, backend)
        assert other[0].equal(loss) and other[1].equal(grad)
    assert grad[~mask].eq(0).all() and grad[1].eq(0).all() and grad[0][mask[0]].ne(0).all()


def test_teachers_may_be_infinite_or_beyond_a_float(place):
    device, backend = place
    student, _, _ = lists((1, 5), device=device)
    expected = run(student, tensor([[3.0, 2.0, 5.0, 4.0, 1.0]], device), backend=backend)[0]
    infinite = tensor([[0.0, -INF, INF, 3.0, -INF]], device)
    large = 2**53 + torch.tensor([[3, 2, 5, 4, 1]], device=device)
    assert all(run(student, teacher, backend=backend)[0].equal(expected) for teacher in (infinite, large))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16])
def test_teachers_of_any_dtype(dtype, place):
    device, backend = place
    student, _, _ = lists((2, 4), device=device)
    teacher = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1]], device=device)
    assert run(student, teacher.to(dtype), backend=backend)[0].equal(run(student, teacher.double(), backend=backend)[0])


@pytest.mark.parametrize("which", [0, 1])
def test_nan_is_loud(which, place):
    device, backend = place
    inputs = lists((3, 5), torch.float32, device)
    mask = torch.ones(3, 5, dtype=torch.bool, device=device)
    mask[2, 4] = False
    inputs[which][1, 2] = NAN
    for given in (None, mask):
        loss, grad = run(*inputs[:2], given, backend)
        assert loss.isnan()
        assert grad.isnan().all() if given is None else grad[mask].isnan().all() and grad[~mask].eq(0).all()
        with torch.no_grad():
            assert list_mle_loss(*inputs[:2], mask=given, backend=backend).isnan()
    lone = [x[1:2, 2:3] for x in inputs[:2]]  # an item alone in its list
    assert run(*lone, backend=backend)[0].isnan() and run(*lone, backend=backend)[1].isnan().all()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (3, 1)])
def test_lists_of_nothing_cost_nothing(shape, place):
    device, backend = place
    student = torch.ones(shape, device=device, requires_grad=True)
    loss = list_mle_loss(student, torch.zeros(shape, device=device), backend=backend)
    loss.backward()
    assert loss.item() == 0 and loss.shape == () and student.grad.equal(torch.zeros(shape, device=device))


def test_half_precision_gradients_survive_loss_scaling(place):
    device, backend = place
    student, teacher, _ = lists((2000, 2), torch.float16, device)
    _, small = run(student.double(), teacher, backend=backend, scale=1e-3)
    _, scaled = run(student, teacher, backend=backend, scale=1e-3, upstream=2.0**20)
    torch.testing.assert_close(scaled.double() / 2**20, small, rtol=2e-3, atol=0)
