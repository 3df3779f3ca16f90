"""list_net_loss: by hand, allRank's values, against the reference, edges, gradients, argument errors."""

from __future__ import annotations

import math

import pytest
import torch

from raoe_kernels import list_net_loss, use_backend
from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.test_listwise import DTYPES, INF, NAN, lists, named, tensor
from tests.kernels.test_listwise import place as place


def run(similarity, teacher, mask=None, backend="scan", upstream=1.0, **options):
    similarity = similarity.detach().clone().requires_grad_()
    loss = list_net_loss(similarity, teacher, mask=mask, backend=backend, **options)
    return loss.detach(), torch.autograd.grad(loss * upstream, similarity)[0]


def test_by_hand(place):
    """Probabilities 1/6, 1/2, 1/3 where 1/4, 1/4, 1/2 are wanted; and 1/4, 3/4 where halves are, of two items."""
    device, backend = place
    similarity = tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 7.0]], device).log()
    teacher = tensor([[1.0, 1.0, 2.0], [5.0, 5.0, 9.0]], device).log()
    mask = torch.tensor([[True, True, True], [True, True, False]], device=device)
    loss, grad = run(similarity, teacher, mask, backend, tau=1, teacher_tau=1)
    first = math.log(6) / 4 + math.log(2) / 4 + math.log(3) / 2
    second = (math.log(4) + math.log(4 / 3)) / 2
    assert loss.item() == pytest.approx((first + second) / 2, rel=1e-14)
    assert grad[0].tolist() == pytest.approx([-1 / 24, 1 / 8, -1 / 12], abs=1e-15)
    assert grad[1].tolist() == pytest.approx([-1 / 8, 1 / 8, 0], abs=1e-15)


def test_taus_are_apart(place):
    """tau 2 squares the student's weights, teacher_tau 3 cubes the teacher's."""
    device, backend = place
    similarity, teacher = tensor([[1.0, 2.0]], device).log(), tensor([[1.0, 3.0]], device).log()
    loss, grad = run(similarity, teacher, backend=backend, tau=2, teacher_tau=3)
    assert loss.item() == pytest.approx((math.log(5) + 27 * math.log(5 / 4)) / 28, rel=1e-14)
    assert grad[0, 0].item() == pytest.approx(2 * (1 / 5 - 1 / 28), rel=1e-13)


@pytest.mark.parametrize("padded", [False, True])
def test_allranks_vectors(padded, place):
    """tests/losses/test_listnet.py of allegro/allRank (c884756): [0.5, 0.2] for [1, 0], and the same with a third item
    that is padding (a target of -1)."""
    device, backend = place
    similarity, teacher = tensor([[0.5, 0.2]], device), tensor([[1.0, 0.0]], device)
    mask = None
    if padded:
        similarity, teacher = tensor([[0.5, 0.2, 0.5]], device), tensor([[1.0, 0.0, -1.0]], device)
        mask = teacher != -1
    wanted, chosen = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.3))
    expected = -wanted * math.log(chosen) - (1 - wanted) * math.log(1 - chosen)
    loss = list_net_loss(similarity, teacher, tau=1, teacher_tau=1, mask=mask, backend=backend)
    assert loss.item() == pytest.approx(expected, rel=1e-13)
    assert loss.item() == pytest.approx(0.6350376711558163, rel=1e-8)  # what their function gives, which adds 1e-10


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize(("tau", "teacher_tau"), [(1.0, 5.0), (20.0, 20.0), (1000.0, 1.0)])
@pytest.mark.parametrize(("shape", "ragged"), [((1, 1), False), ((3, 33), False), ((4, 20), True), ((2, 150), True)])
def test_against_the_reference(shape, ragged, tau, teacher_tau, dtype, place, poisoned):
    device, backend = place
    similarity, teacher, mask = lists(shape, dtype, seed=shape[1], ragged=ragged)
    on_device = [x if x is None else x.to(device) for x in (similarity, teacher, mask)]
    options = {"upstream": -2.5, "tau": tau, "teacher_tau": teacher_tau}
    ours = run(*on_device, backend, **options)
    plain = run(similarity, teacher, mask, "reference", **options)
    truth = run(similarity.double(), teacher.double(), mask, "reference", **options)
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours[1].dtype == dtype
    exponents = tau * (similarity.max() - similarity.min()).item() + teacher_tau * 1.5
    assert_loss_accurate(ours[0], plain[0], truth[0], exponents)
    assert_gradient_accurate(ours[1], plain[1], truth[1], exponents)


def test_its_minimum_is_the_teacher(place):
    """Where tau x similarity is teacher_tau x teacher but for a constant, the loss is the entropy and nothing moves."""
    device, backend = place
    _, teacher, mask = lists((4, 6), device=device, ragged=True)
    loss, grad = run(0.25 * teacher + 3, teacher, mask, backend, tau=8, teacher_tau=2)
    entropies = []
    for row, real in zip(teacher.tolist(), mask.tolist(), strict=True):
        weights = [math.exp(2 * x) for x, there in zip(row, real, strict=True) if there]
        entropies.append(-sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights))
    assert loss.item() == pytest.approx(sum(entropies) / 4, rel=1e-12)
    assert grad.abs().max() < 1e-12


def test_what_is_masked_has_no_influence(place, poisoned):
    device, backend = place
    similarity, teacher, mask = lists((4, 9), torch.float32, device, ragged=True)
    mask[1] = False
    loss, grad = run(similarity, teacher, mask, backend)
    assert loss.isfinite()
    for junk in (NAN, INF, -INF):
        other = run(similarity.masked_fill(~mask, junk), teacher.masked_fill(~mask, junk), mask, backend)
        assert other[0].equal(loss) and other[1].equal(grad)
    assert grad[~mask].eq(0).all() and grad[1].eq(0).all() and grad[0][mask[0]].ne(0).all()


def test_lists_of_nothing_and_of_one_count(place):
    device, backend = place
    similarity, teacher, _ = lists((3, 8), device=device)
    mask = torch.zeros(3, 8, dtype=torch.bool, device=device)
    mask[0, [0, 3, 4]] = True
    mask[2, 5] = True
    alone = run(similarity[:1, [0, 3, 4]], teacher[:1, [0, 3, 4]], backend=backend)
    loss, grad = run(similarity, teacher, mask, backend)
    torch.testing.assert_close(loss, alone[0] / 3)
    torch.testing.assert_close(grad[0, [0, 3, 4]], alone[1][0] / 3)
    assert grad[1:].abs().max() == 0
    for shape in ((0, 4), (3, 0), (0, 0), (3, 1)):
        empty = torch.ones(shape, device=device, requires_grad=True)
        nothing = list_net_loss(empty, torch.zeros(shape, device=device), backend=backend)
        nothing.backward()
        assert nothing.item() == 0 and nothing.shape == () and empty.grad.equal(torch.zeros(shape, device=device))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16])
def test_teachers_of_any_dtype(dtype, place):
    device, backend = place
    similarity, _, mask = lists((2, 4), device=device, ragged=True)
    teacher = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1]], device=device)
    expected = run(similarity, teacher.double(), mask, backend)[0]
    torch.testing.assert_close(run(similarity, teacher.to(dtype), mask, backend)[0], expected)


def test_large_integers_are_not_rounded(place):
    device, backend = place
    similarity, _, _ = lists((1, 3), device=device)
    big = 2**53
    teacher = torch.tensor([[big, big + 2, big + 1]], device=device)
    assert run(similarity, teacher, backend=backend)[0].equal(run(similarity, teacher - big, backend=backend)[0])


def test_minus_infinity_is_never_wanted(place):
    device, backend = place
    similarity = tensor([[0.3, -0.2, 0.9]], device)
    loss, _ = run(similarity, tensor([[0.1, -INF, 0.4]], device), backend=backend, tau=2, teacher_tau=3)
    (p,), s = torch.softmax(tensor([[0.3, 1.2]], device), 1), 2 * similarity[0]
    assert loss.item() == pytest.approx((s.logsumexp(0) - p[0] * s[0] - p[1] * s[2]).item(), rel=1e-13)


@pytest.mark.parametrize("which", [0, 1])
def test_nan_is_loud(which, place):
    device, backend = place
    inputs = lists((3, 5), torch.float32, device)
    inputs[which][1, 2] = NAN
    loss, grad = run(*inputs[:2], None, backend)
    assert loss.isnan() and grad.isnan().all()


@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_calls_and_compilation(ragged, place):
    device, backend = place
    similarity, teacher, mask = lists((3, 5), device=device, ragged=ragged)
    similarity.requires_grad_()

    def call(s):
        return list_net_loss(s, teacher, tau=3, teacher_tau=4, mask=mask, backend=backend)

    assert torch.autograd.gradcheck(call, similarity)
    assert not call(similarity.detach()).requires_grad
    with pytest.raises(RuntimeError, match="list_net_loss has no second derivative"):
        torch.autograd.grad(call(similarity), similarity, create_graph=True)
    torch.library.opcheck(
        torch.ops.raoe_kernels.list_net.default, (similarity, teacher, mask, 20.0, 5.0, True, backend)
    )
    torch._dynamo.reset()
    traced = torch.compile(call, fullgraph=True, backend="aot_eager")(similarity)
    torch.testing.assert_close(traced, call(similarity))
    torch.testing.assert_close(*(torch.autograd.grad(loss, similarity)[0] for loss in (traced, call(similarity))))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert call(similarity).equal(call(similarity.detach()))


S, M = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("error", "message", "similarity", "teacher", "options"),
    [
        (TypeError, "similarity must be float16, .* int64 tensor", S.long(), S, {}),
        (ValueError, "similarity must have 2 dimensions", S[0], S[0], {}),
        (ValueError, r"teacher must have similarity's shape \(2, 3\)", S, S[:1], {}),
        (ValueError, "teacher must not require grad", S, torch.zeros(2, 3, requires_grad=True), {}),
        (TypeError, "mask must be a bool tensor, got float32", S, S, {"mask": S}),
        (ValueError, r"mask must have similarity's shape .* \(3,\)", S, S, {"mask": M[0]}),
        (ValueError, "tau must be a finite number > 0, got 0", S, S, {"tau": 0}),
        (ValueError, "teacher_tau must be a finite number > 0, got -1", S, S, {"teacher_tau": -1}),
        (RuntimeError, "listwise has no triton backend", S, S, {"backend": "triton"}),
    ],
)
def test_argument_errors(error, message, similarity, teacher, options):
    with pytest.raises(error, match=message):
        list_net_loss(similarity, teacher, **options)


def test_a_block_of_another_backend_is_exempt():
    with use_backend("triton"):
        assert list_net_loss(S, S).item() == pytest.approx(math.log(3))
