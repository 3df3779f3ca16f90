"""guided_log_probs and guided_argmax as calls: strides, modes, argument errors, compilation."""

from __future__ import annotations

import math

import pytest
import torch

from raoe_kernels import guided_argmax, guided_log_probs, use_backend
from tests.kernels.conftest import PLACES
from tests.kernels.gpu_checks import NoLaunch, operations
from tests.kernels.test_guided import logits, place, run, upstream

__all__ = ["place"]  # a fixture

INF, NAN = math.inf, math.nan


def test_rows_of_a_wider_matrix_and_other_strides(place, poisoned):
    device, backend = place
    current, previous = logits((4, 33), torch.float32, device)
    expected = run(current, previous, backend)
    both = torch.full((8, 3, 50), 9.0, device=device)  # contexts interleaved, one position of a sequence, a prefix
    both[0::2, 1, 5:38], both[1::2, 1, 5:38] = current, previous
    both.requires_grad_()
    result = guided_log_probs(both[0::2, 1, 5:38], both[1::2, 1, 5:38], guidance=1.5, backend=backend)
    (grad,) = torch.autograd.grad(result, both, upstream(result).t().contiguous().t())
    torch.testing.assert_close(result, expected[0])
    torch.testing.assert_close(grad[0::2, 1, 5:38], expected[1])
    torch.testing.assert_close(grad[1::2, 1, 5:38], expected[2])
    columns = current.t().contiguous().t(), previous.t().contiguous().t()
    for x, e in zip(run(*columns, backend), expected, strict=True):
        torch.testing.assert_close(x, e)
    assert guided_argmax(*columns, guidance=1.5, backend=backend).equal(
        guided_argmax(current, previous, guidance=1.5, backend=backend)
    )


def test_a_gradient_of_no_strides(place):
    device, backend = place
    current, previous = (x.requires_grad_() for x in logits((3, 7), torch.float64, device))
    guided_log_probs(current, previous, guidance=1.5, backend=backend).sum().backward()
    for x, weight in ((current, 1.5), (previous, -0.5)):
        torch.testing.assert_close(x.grad, weight * (1 - 7 * x.detach().softmax(-1)))


def test_a_gradient_of_other_strides(place):
    """Aligned logits whose gradient from above is every second column of something."""
    device, backend = place
    inputs = [x.requires_grad_() for x in logits((3, 32), torch.float32, device)]
    grad = torch.linspace(-2, 3, 192, device=device).reshape(3, 64)[:, ::2]
    result = guided_log_probs(*inputs, guidance=1.5, backend=backend)
    strided, plain = (torch.autograd.grad(result, inputs, g, retain_graph=True) for g in (grad, grad.contiguous()))
    for x, y in zip(strided, plain, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("place", [p for p in PLACES if p[1] == "triton"], indirect=True, ids="-".join)
@pytest.mark.parametrize("columns", [112, 115])
def test_many_slices_and_many_launches(columns, place, monkeypatch, poisoned):
    """More slices than are joined at once, and a pair of launches for every second row."""
    from raoe_kernels.guided import triton_kernels

    device, backend = place
    seeded = logits((5, columns), torch.float32, device, forbidden=(3, 111))
    seeded[0][1, :90] = seeded[1][2, 20:40] = -INF
    seeded[0][3], seeded[0][4, [100, 77, 78]] = -INF, NAN
    truth = run(*(x.double() for x in seeded), "reference")
    best = guided_argmax(*(x.double() for x in seeded), guidance=1.5, backend="reference")
    monkeypatch.setattr(triton_kernels, "COLUMNS", {4: 16})
    monkeypatch.setattr(triton_kernels, "JOINED", 4)
    monkeypatch.setattr(triton_kernels, "IN_CACHE", 2 * 2 * 4 * columns)
    for x, t in zip(run(*seeded, backend), truth, strict=True):
        torch.testing.assert_close(x.double(), t, rtol=1e-5, atol=2e-4, equal_nan=True)
    assert guided_argmax(*seeded, guidance=1.5, backend=backend).equal(best)
    assert list(triton_kernels._groups(5, 2 * 4 * columns)) == [(0, 2), (2, 2), (4, 1)]


def test_a_call_allocates_and_nothing_else(monkeypatch):
    kernels = pytest.importorskip("raoe_kernels.guided.triton_kernels")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("forward_sums", "forward_mix", "backward_sums", "backward_mix", "argmax_slices", "argmax_join"):
        monkeypatch.setattr(kernels, f"guided_{name}", NoLaunch())
    inputs = [x.requires_grad_() for x in logits((3, 64), torch.float32)]
    above = torch.ones(3, 64)

    def step():
        mixed = guided_log_probs(*inputs, guidance=1.5, backend="triton")
        torch.autograd.grad(mixed, inputs, above)
        guided_argmax(*inputs, guidance=1.5, backend="triton")

    found = [name for name in operations(step) if name != "aten.detach"]
    assert found == ["aten.new_empty"] * (4 + 3 + 3)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_partial_gradients(needs, place):
    device, backend = place
    inputs = logits((4, 9), torch.float32, device)
    both = run(*inputs, backend)[1:]
    for x, need in zip(inputs, needs, strict=True):
        x.requires_grad_(need)
    result = guided_log_probs(*inputs, guidance=1.5, backend=backend)
    assert result.requires_grad == any(needs)
    if any(needs):
        result.backward(upstream(result))
    for x, need, expected in zip(inputs, needs, both, strict=True):
        assert torch.equal(x.grad, expected) if need else x.grad is None


def test_no_grad_and_inputs_unchanged(place):
    device, backend = place
    current, previous = (x.requires_grad_() for x in logits((4, 9), torch.bfloat16, device))
    copies = current.detach().clone(), previous.detach().clone()
    with torch.no_grad():
        assert not guided_log_probs(current, previous, guidance=1.5, backend=backend).requires_grad
    run(current, previous, backend)
    guided_argmax(current, previous, guidance=1.5, backend=backend)
    assert current.equal(copies[0]) and previous.equal(copies[1])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 5), (0,)])
def test_empty(shape, place):
    device, backend = place
    current, previous = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    result = guided_log_probs(current, previous, guidance=1.5, backend=backend)
    result.sum().backward()
    assert result.shape == current.grad.shape == previous.grad.shape == shape
    if shape[-1]:
        assert guided_argmax(current, previous, guidance=1.5, backend=backend).shape == shape[:-1]
    else:
        with pytest.raises(ValueError, match="current must have at least one token"):
            guided_argmax(current, previous, guidance=1.5, backend=backend)


def test_gradcheck(place):
    device, backend = place
    inputs = [x.requires_grad_() for x in logits((2, 3), torch.float64, device)]
    assert torch.autograd.gradcheck(lambda x, y: guided_log_probs(x, y, guidance=1.5, backend=backend), inputs)


def test_double_backward_is_refused(place):
    device, backend = place
    current, previous = (x.requires_grad_() for x in logits((3, 6), torch.float64, device))
    with pytest.raises(RuntimeError, match="guided has no second derivative"):
        result = guided_log_probs(current, previous, guidance=1.5, backend=backend)
        torch.autograd.grad(result.sum(), current, create_graph=True)


def test_equal_inputs_give_bit_equal_results(place):
    device, backend = place
    inputs = logits((3, 4200), torch.float32, device)
    for x, y in zip(run(*inputs, backend), run(*inputs, backend), strict=True):
        assert x.equal(y)


def test_a_row_does_not_depend_on_the_others(place):
    device, backend = place
    inputs = logits((5, 70), torch.float32, device)
    alone = guided_log_probs(*(x[3] for x in inputs), guidance=1.5, backend=backend)
    assert guided_log_probs(*inputs, guidance=1.5, backend=backend)[3].equal(alone)


def test_autocast(place):
    device, backend = place
    current, previous = logits((3, 40), torch.bfloat16, device)
    outside = run(current, previous, backend)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = run(current, previous, backend)
    for x, y in zip(inside, outside, strict=True):
        assert x.dtype == y.dtype and x.equal(y)


def test_scan_stores_no_log_softmax(monkeypatch):
    """Beyond logits and result there are only chunks: with rows of 64 in chunks of 256, no tensor of 100 rows."""
    from raoe_kernels.guided import scan
    from raoe_kernels.guided.problem import Problem

    monkeypatch.setattr(scan, "CHUNK", 256)
    current, previous = logits((100, 64), torch.float32)
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() >= current.numel():
                made.append(result.untyped_storage().data_ptr())
            return result

    with Watch():
        result, _ = scan.forward(Problem(current, previous, 1.5), (False, False))
    assert set(made) == {result.untyped_storage().data_ptr()}


@pytest.mark.parametrize("function", [guided_log_probs, guided_argmax])
@pytest.mark.parametrize(
    ("error", "message", "current", "previous", "guidance"),
    [
        (TypeError, "current must be a tensor, got 3.0", 3.0, torch.zeros(2, 3), 1.5),
        (TypeError, r"previous must be a tensor, got \[1\]", torch.zeros(2, 3), [1], 1.5),
        (TypeError, "current must be float16, .* got int64 tensor", torch.zeros(2, 3).long(), torch.zeros(2, 3), 1.5),
        (ValueError, "current must have 1 dimension, got", torch.zeros(()), torch.zeros(()), 1.5),
        (ValueError, r"same shape, .* \(2, 3\) .* \(3,\)", torch.zeros(2, 3), torch.zeros(3), 1.5),
        (ValueError, "same shape, dtype", torch.zeros(2, 3), torch.zeros(2, 3).double(), 1.5),
        (ValueError, "device", torch.zeros(2, 3), torch.zeros(2, 3, device="meta"), 1.5),
        (ValueError, "guidance must be a finite number >= 0, got -0.5", torch.zeros(3), torch.zeros(3), -0.5),
        (ValueError, "guidance must be a finite number >= 0, got nan", torch.zeros(3), torch.zeros(3), NAN),
        (ValueError, "guidance must be a finite number >= 0, got inf", torch.zeros(3), torch.zeros(3), INF),
        (TypeError, "guidance must be a Python number", torch.zeros(3), torch.zeros(3), torch.tensor(1.5)),
        (TypeError, "guidance must be a number, got '1.5'", torch.zeros(3), torch.zeros(3), "1.5"),
    ],
)
def test_argument_errors(function, error, message, current, previous, guidance):
    with pytest.raises(error, match=message):
        function(current, previous, guidance=guidance)


def test_backends_by_name():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="backend must be one of"):
        guided_log_probs(x, x, guidance=1.5, backend="cuda")
    with pytest.raises(RuntimeError, match="cannot run guided on cpu: guided has no native backend"):
        guided_argmax(x, x, guidance=1.5, backend="native")
    with use_backend("native"):
        assert guided_argmax(x, x, guidance=1.5).tolist() == [0, 0]


@pytest.mark.parametrize("guidance", [pytest.param(1.0, marks=pytest.mark.slow), 1.5])
def test_opcheck(guidance, place):
    device, backend = place
    inputs = [x.requires_grad_() for x in logits((3, 5), torch.float32, device)]
    torch.library.opcheck(torch.ops.raoe_kernels.guided.default, (*inputs, guidance, (1, 1), backend))
    detached = [x.detach() for x in inputs]
    torch.library.opcheck(torch.ops.raoe_kernels.guided_argmax.default, (*detached, guidance, (), backend))


@pytest.mark.parametrize("guidance", [pytest.param(1.0, marks=pytest.mark.slow), 1.5])
def test_fullgraph_gives_the_same(guidance, place):
    device, backend = place

    def step(current, previous):
        mixed = guided_log_probs(current, previous, guidance=guidance, backend=backend)
        return mixed, guided_argmax(current, previous, guidance=guidance, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shape in ((2, 3, 9), (2, 4, 12)):
        inputs = [x.requires_grad_() for x in logits(shape, torch.float32, device)]
        (eager, best), (traced, traced_best) = step(*inputs), compiled(*inputs)
        torch.testing.assert_close(traced, eager)
        assert traced_best.equal(best)
        ours, theirs = (torch.autograd.grad(x, inputs, upstream(x)) for x in (traced, eager))
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y)
