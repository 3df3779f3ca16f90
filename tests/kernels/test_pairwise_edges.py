"""The edges of the pairwise losses: empty, NaN, the clip, huge exponents, precision."""

import math

import pytest
import torch

from raoe_kernels import gated_angular_loss, rank_margin_loss, raoe_loss
from tests.kernels.conftest import available

NAN = math.nan


def batch(device, c, s, l, dtype=torch.float32):
    return (
        torch.tensor(c, dtype=dtype, device=device, requires_grad=True),
        torch.tensor(s, dtype=torch.float32, device=device),
        torch.tensor(l, device=device),
    )


@pytest.mark.parametrize("pairs", [0, 1])
@pytest.mark.parametrize("parts", [False, True])
def test_too_few_pairs(pairs, parts, place, poisoned):
    device, backend = place
    c, s, l = batch(device, [0.5] * pairs, [1.0] * pairs, [0] * pairs)
    result = raoe_loss(c, s, l.long(), return_parts=parts, backend=backend)
    losses = torch.stack(result) if parts else result
    losses.sum().backward()
    assert losses.eq(0).all() and c.grad.shape == (pairs,) and c.grad.eq(0).all()


@pytest.mark.parametrize("pairs", [1, 2, 3, 40])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_nan_similarity_spoils_everything(pairs, where, place):
    device, backend = place
    values = [0.1 * (i % 7) for i in range(pairs)]
    values[0 if where == "first" else -1] = NAN
    for scores in (list(range(pairs)), [3.0] * pairs):  # with and without active pairs
        for op, labels in ((rank_margin_loss, None), (gated_angular_loss, [i % 3 for i in range(pairs)])):
            c, s, l = batch(device, values, scores, labels or [0] * pairs)
            loss = op(c, s, *([l] if labels else []), backend=backend)
            loss.backward()
            assert loss.isnan() and c.grad.isnan().all(), op.__name__


@pytest.mark.parametrize("pairs", [1, 2, 40])
def test_a_nan_score_spoils_what_uses_it(pairs, place):
    device, backend = place
    c, s, l = batch(
        device, [0.1 * (i % 7) for i in range(pairs)], [1.0 * i for i in range(pairs)], [i % 3 for i in range(pairs)]
    )
    s[pairs // 2] = NAN
    for gate in ("label+score", "score"):
        loss = gated_angular_loss(c, s, l, gate=gate, backend=backend)
        (grad,) = torch.autograd.grad(loss, c)
        assert loss.isnan() and grad.isnan().all()
    by_label = gated_angular_loss(c, s, l, gate="label", backend=backend)
    assert by_label.isfinite()
    assert torch.equal(by_label, gated_angular_loss(c, None, l, gate="label", backend=backend))
    clean = torch.arange(pairs, device=device).float()
    by_score = gated_angular_loss(c, clean, None, gate="score", backend=backend)
    assert torch.equal(by_score, gated_angular_loss(c, clean, l, gate="score", backend=backend))
    rank, angle = raoe_loss(c, s, l, gate="label", return_parts=True, backend=backend)
    assert rank.isnan() and angle.isfinite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_identical_and_opposite_sentences(dtype, place):
    """c = 1 and c = -1 exactly: finite loss, gradient 0 there (the authors' code gives NaN), and not 0 elsewhere."""
    device, backend = place
    values = [1.0, -1.0, 0.5, 1.0, -1.0, 0.25, 1.5, -7.0]
    c, s, l = batch(device, values, range(8), [2, 1, 0, 2, 1, 0, 2, 0], dtype)
    loss = gated_angular_loss(c, s, l, scale=2.0, backend=backend)  # a scale whose weights float16 can hold
    loss.backward()
    clipped = torch.tensor([abs(v) >= 1 for v in values], device=device)
    assert loss.isfinite() and c.grad.isfinite().all()
    assert c.grad[clipped].eq(0).all() and c.grad[~clipped].ne(0).all()


@pytest.mark.parametrize("distance", [2e-6, 1e-5, 1e-4, 1e-3])
def test_the_slope_near_the_ends_keeps_its_digits(distance, place):
    device, backend = place
    # torch's own acos loses these digits in float32, which is why the reference is only ever the truth in float64.
    dtype = torch.float64 if backend == "reference" else torch.float32
    c = torch.tensor([1 - distance, 0.3], device=device, dtype=dtype, requires_grad=True)
    loss = gated_angular_loss(
        c, torch.tensor([0.0, 1.0], device=device), torch.tensor([1, 0], device=device), backend=backend
    )
    loss.backward()
    x, y = c.detach().double().tolist()
    exponent = 20 * (math.acos(y) - math.acos(x))
    weight = 20 / (1 + math.exp(-exponent))
    assert c.grad[0].item() == pytest.approx(weight / math.sqrt((1 - x) * (1 + x)), rel=2e-6)
    assert loss.item() == pytest.approx(exponent, rel=1e-6)


def test_scores_compare_in_their_own_dtype(place):
    """Scores that float32 cannot tell apart are still different scores."""
    device, backend = place
    c = torch.tensor([0.5, 0.2], device=device)
    for values, dtype in (
        ([1.0, 1 + 1e-15], torch.float64),
        ([2**60, 2**60 + 1], torch.int64),
        ([-(2**63), 2**63 - 1], torch.int64),
    ):
        s = torch.tensor(values, dtype=dtype, device=device)
        up = rank_margin_loss(c, s, margin=0, scale=1.0, backend=backend).item()
        down = rank_margin_loss(c, s.flip(0), margin=0, scale=1.0, backend=backend).item()
        assert up == pytest.approx(math.log1p(math.exp(0.3)), rel=1e-6)
        assert down == pytest.approx(math.log1p(math.exp(-0.3)), rel=1e-6)


def test_subnormal_scores_are_ordered(place):
    device, backend = place
    c = torch.tensor([0.5, 0.2, 0.1], device=device)
    s = torch.tensor([0.0, 1e-45, -1e-45], device=device)
    loss = rank_margin_loss(c, s, margin=0, scale=1.0, backend=backend).item()
    assert loss == pytest.approx(
        math.log(1 + math.exp(0.1 - 0.5) + math.exp(0.1 - 0.2) + math.exp(0.5 - 0.2)), rel=1e-6
    )
    zeros = torch.tensor([0.0, -0.0, 0.0], device=device)
    assert rank_margin_loss(c, zeros, margin=0, backend=backend).item() == 0


def test_half_gradients_survive_loss_scaling(place):
    """The gradient is kept in float32 until the upstream factor is in it: a scale of 2^-20 and back loses nothing."""
    device, backend = place
    c, s, l = batch(device, [0.4, 0.2, 0.7, -0.5], [3, 2, 1, 0], [0, 1, 2, 2], torch.float16)
    tiny = torch.autograd.grad(raoe_loss(c, s, l, scale=1e-4, backend=backend) * 2.0**14, c)[0]
    full = c.detach().float().requires_grad_()
    expected = torch.autograd.grad(raoe_loss(full, s, l, scale=1e-4, backend=backend) * 2.0**14, full)[0]
    torch.testing.assert_close(tiny.float(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.bool])
def test_scores_of_every_dtype_are_compared_as_they_are(dtype, place):
    """The largest of bfloat16 are far beyond float16's."""
    device, backend = place
    c, s, _ = batch(device, [0.4, 0.2, 0.7], [1, 0, 2], [0, 1, 2])
    scores = (s * 1e38 if dtype == torch.bfloat16 else s).to(dtype)
    expected = rank_margin_loss(c, scores.double(), margin=0, backend="reference" if device == "cpu" else backend)
    loss = rank_margin_loss(c, scores, margin=0, backend=backend)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and loss.item() > 0


def test_threads_do_not_change_the_bits():
    available(("cpu", "native"), "raoe_loss")
    generator = torch.Generator().manual_seed(3)
    c = torch.rand(200_000, generator=generator, requires_grad=True)
    s, l = torch.rand(200_000, generator=generator), torch.randint(3, (200_000,), generator=generator)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        loss = raoe_loss(c, s, l, backend="native")
        results.append((loss.detach(), torch.autograd.grad(loss, c)[0]))
    torch.set_num_threads(before)
    for loss, grad in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-5, atol=1e-10)
