"""guided_log_probs and guided_argmax: every backend x dtype against Eq. 4 in float64, and edges."""

import math
import re
from pathlib import Path

import pytest
import torch

import raoe_kernels
from raoe_kernels import guided_argmax, guided_log_probs, use_backend
from raoe_kernels.testing import GRADIENT_FACTOR, LOSS_FACTOR, ULPS, assert_accurate
from tests.kernels.conftest import PLACES, available
from tests.kernels.pairwise_cases import EVERY_DTYPE

INF, NAN = math.inf, math.nan
# Rows of 96, 8192 and 8224 are aligned: less than a step of the Triton kernels, a whole number of them, and a rest.
SHAPES = [(1, 1), (3, 7), (2, 96), (1, 8192), (2, 8224), (2, 5000), (2, 3, 33), (5,)]


@pytest.fixture(params=[p for p in PLACES if p[1] != "native"], ids=lambda p: "-".join(p))
def place(request):
    return available(request.param, "guided_log_probs")


def logits(shape, dtype=torch.float64, device="cpu", seed=0, forbidden=()):
    """Two contexts of logits with a spread of 4; the first has -inf at the columns `forbidden`."""
    seeded = torch.Generator().manual_seed(seed)
    current, previous = (4 * torch.randn(shape, generator=seeded, dtype=torch.float64) for _ in range(2))
    current[..., list(forbidden)] = -INF
    return current.to(dtype).to(device), previous.to(dtype).to(device)


def tensor(values, device="cpu", dtype=torch.float64):
    return torch.tensor(values, device=device, dtype=dtype)


def upstream(like):
    return torch.linspace(-2, 3, like.numel(), dtype=like.dtype, device=like.device).reshape(like.shape)


def run(current, previous, backend, guidance=1.5):
    current, previous = (x.detach().clone().requires_grad_() for x in (current, previous))
    result = guided_log_probs(current, previous, guidance=guidance, backend=backend)
    return result.detach(), *torch.autograd.grad(result, (current, previous), upstream(result))


def eq_4(current, previous, guidance):
    """Of one list of numbers each, with math alone."""

    def log_softmax(z):
        total = math.log(sum(math.exp(x) for x in z))
        return [x - total for x in z]

    p, q = log_softmax(current), log_softmax(previous)
    return [guidance * a - (guidance - 1) * b for a, b in zip(p, q, strict=True)]


@pytest.mark.parametrize("guidance", [0, 0.4, 1, 1.5, 7])
def test_is_equation_4(guidance, place):
    device, backend = place
    current, previous = logits((3, 11))
    result = guided_log_probs(current.to(device), previous.to(device), guidance=guidance, backend=backend)
    best = guided_argmax(current.to(device), previous.to(device), guidance=guidance, backend=backend)
    for row, x, y in zip(range(3), current.tolist(), previous.tolist(), strict=True):
        expected = eq_4(x, y, guidance)
        assert result[row].tolist() == pytest.approx(expected, rel=1e-13, abs=1e-13)
        assert best[row] == expected.index(max(expected))


def test_transformers_processors_sample_from_it(place):
    """The README's own example, on a row of which everything is known."""
    device, backend = place
    pytest.importorskip("transformers")
    readme = (Path(raoe_kernels.__file__).parent / "guided" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    # p = (1/2, 1/4, 1/4, 0), q = (1/4, 1/2, 1/4, 0); p^1.5 / q^0.5 is in proportion to 4, 1, 2 times 2^-1.5 ...
    current = tensor([[4.0, 2.0, 2.0, 0.0]], device, torch.float32).log()
    previous = tensor([[1.0, 2.0, 1.0, 0.0]], device, torch.float32).log()
    weights = [0.5**1.5 / 0.25**0.5, 0.25**1.5 / 0.5**0.5, 0.25**1.5 / 0.25**0.5]
    for temperature, top_p, kept in ((1.0, 1.0, [0, 1, 2]), (0.5, 1.0, [0, 1, 2]), (1.0, 0.8, [0, 2]), (0.5, 0.8, [0])):
        torch.manual_seed(0)
        names = {"current": current, "previous": previous, "temperature": temperature, "top_p": top_p,
                 "input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}  # fmt: skip
        with use_backend(backend):
            exec(example, names)
        raised = [w ** (1 / temperature) if k in kept else 0.0 for k, w in enumerate(weights)] + [0.0]
        expected = [w / sum(raised) for w in raised]
        assert names["probabilities"].tolist()[0] == pytest.approx(expected, rel=1e-5)
        assert names["token"].tolist()[0] in kept


@EVERY_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_against_the_reference(shape, dtype, place, poisoned):
    device, backend = place
    forbidden = (1, 4) if shape[-1] > 5 else ()
    ours = run(*logits(shape, dtype, device, forbidden=forbidden), backend)
    plain = run(*logits(shape, dtype, forbidden=forbidden), "reference")
    truth = run(*(x.double() for x in logits(shape, dtype, forbidden=forbidden)), "reference")
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours[1].dtype == ours[2].dtype == dtype
    for name, factor, x, p, t in zip(
        ("result", "by current", "by previous"), (LOSS_FACTOR, GRADIENT_FACTOR, GRADIENT_FACTOR), ours, plain, truth,
        strict=True,
    ):  # fmt: skip
        assert x.shape == shape
        # log-probabilities are differences of logits and normalisers; gradients of what comes from above and its sum
        exact = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        size = 40.0 if name == "result" else 1.5 * (3 + 5 * shape[-1] / 2)
        floor = ULPS * (exact * size if name == "result" else torch.finfo(dtype).eps * t.abs().max() + exact * size)
        assert_accurate(name, x, p, t, factor=factor, floor=float(floor))


@EVERY_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_argmax_is_the_best_log_probability(shape, dtype, place):
    device, backend = place
    current, previous = logits(shape, dtype, device, seed=3, forbidden=(0,) if shape[-1] > 1 else ())
    best = guided_argmax(current, previous, guidance=1.5, backend=backend)
    assert best.dtype == torch.int64 and best.shape == shape[:-1] and not best.requires_grad
    exact = guided_log_probs(current.double(), previous.double(), guidance=1.5, backend=backend)
    chosen = exact.gather(-1, best[..., None])[..., 0]
    assert (exact.amax(-1) - chosen).max() <= 1e-5
    if shape[-1] > 1:
        assert best.min() > 0


def test_the_first_of_equals_wins(place):
    device, backend = place
    current = torch.zeros(3, 5000, device=device)
    current[0, [40, 41, 4500]] = 2.0
    current[1, [4999, 4097]] = 2.0
    best = guided_argmax(current, torch.zeros_like(current), guidance=1.5, backend=backend)
    assert best.tolist() == [40, 4097, 0]


def test_forbidden_tokens_stay_forbidden(place, poisoned):
    device, backend = place
    current = tensor([[-INF, 1.0, 2.0, -INF], [-INF] * 4, [-INF, 0.0, -INF, -INF]], device)
    previous = tensor([[-INF, 0.0, 0.0, 9.0], [1.0] * 4, [-INF, 5.0, 5.0, -INF]], device)
    for guidance in (0, 0.5, 1, 1.5):
        result, by_current, by_previous = run(current, previous, backend, guidance)
        assert result.isneginf().equal(current.isneginf())
        assert by_current[current.isneginf()].eq(0).all()
        assert by_current.isfinite().all() and by_previous.isfinite().all()
        # an impossible token of both contexts has no gradient; a possible one of previous is part of its normaliser
        assert by_previous[:, 0].eq(0)[[0, 2]].all() and by_previous[1].eq(0).all()
    assert guided_argmax(current, previous, guidance=1.5, backend=backend).tolist() == [2, 0, 1]
    expected = eq_4([1.0, 2.0], [0.0, 0.0], 1.5)
    # previous' normaliser counts the token that only current forbids: log(2 + e^9) instead of log 2
    shift = 0.5 * (math.log(2 + math.exp(9)) - math.log(2))
    result = guided_log_probs(current, previous, guidance=1.5, backend=backend)
    assert result[0, 1:3].tolist() == pytest.approx([x + shift for x in expected], rel=1e-14)


def test_the_gradient_from_above_is_ignored_where_the_result_is_infinite(place):
    device, backend = place
    values = [[1.0, -INF, 3.0, 0.5]], [[2.0, 1.0, -INF, 0.0]]
    grads = []
    for ignored in (0.0, NAN, 7.0):
        current, previous = (tensor(x, device).requires_grad_() for x in values)
        result = guided_log_probs(current, previous, guidance=1.5, backend=backend)
        assert result.tolist()[0][1:3] == [-INF, INF]
        grads.append(torch.autograd.grad(result, (current, previous), tensor([[1.0, ignored, ignored, 2.0]], device)))
    for by_current, by_previous in grads[1:]:
        assert by_current.equal(grads[0][0]) and by_previous.equal(grads[0][1])
    assert grads[0][0][0, 1] == 0 and grads[0][0].isfinite().all() and grads[0][1].isfinite().all()


def test_what_only_the_farther_context_forbids(place):
    device, backend = place
    current, previous = tensor([[1.0, 2.0, 3.0]], device), tensor([[1.0, -INF, 3.0]], device)
    for guidance, there in ((1.5, INF), (0.5, -INF), (0, -INF)):
        result = guided_log_probs(current, previous, guidance=guidance, backend=backend)
        assert result[0, 1] == there and result[0, [0, 2]].isfinite().all()
    assert guided_argmax(current, previous, guidance=1.5, backend=backend).tolist() == [1]
    assert guided_argmax(current, previous, guidance=0.5, backend=backend).tolist() == [2]


def test_with_guidance_1_previous_is_ignored(place):
    device, backend = place
    current, previous = logits((3, 40), torch.float32, device)
    nothing = torch.full_like(previous, NAN)
    result, by_current, by_previous = run(current, nothing, backend, 1)
    torch.testing.assert_close(result, current.log_softmax(-1))
    leaf = current.clone().requires_grad_()
    (expected,) = torch.autograd.grad(leaf.log_softmax(-1), leaf, upstream(result))
    torch.testing.assert_close(by_current, expected)
    assert by_previous.eq(0).all() and run(nothing, nothing, backend, 1)[2].eq(0).all()
    assert guided_argmax(current, nothing, guidance=1, backend=backend).equal(current.argmax(-1))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("which", [0, 1])
def test_nan_stays_in_its_row(which, bad, place):
    device, backend = place
    inputs = logits((3, 8), torch.float32, device, forbidden=(6,))
    inputs[which][1, 3] = bad
    result, *grads = run(*inputs, backend)
    rest = [i for i in range(8) if i != 6]
    assert result[1, rest].isnan().all() and result[:, 6].eq(-INF).all()
    assert result[[0, 2]][:, rest].isfinite().all()
    assert grads[which][1, rest].isnan().all() and all(g[[0, 2]].isfinite().all() for g in grads)
    if math.isnan(bad):
        assert guided_argmax(*inputs, guidance=1.5, backend=backend)[1] == 3


def test_extreme_logits(place):
    device, backend = place
    current = tensor([[1e30, -1e30, 0.0], [6e4, 6e4, -6e4]], device, torch.float32)
    previous = tensor([[0.0, 1.0, -1e30], [-6e4, 6e4, 0.0]], device, torch.float32)
    result, *grads = run(current, previous, backend)
    truth = run(current.double().cpu(), previous.double().cpu(), "reference")
    for x, t in zip((result, *grads), truth, strict=True):
        torch.testing.assert_close(x.cpu().double(), t, rtol=1e-6, atol=1e-6)
