"""guided_log_probs and guided_argmax as calls: many launches, nothing to do, argument errors."""

import math

import pytest
import torch

from raoe_kernels import guided_argmax, guided_log_probs
from tests.kernels.conftest import PLACES
from tests.kernels.test_guided import logits, place, run

__all__ = ["place"]  # a fixture

INF, NAN = math.inf, math.nan


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


@pytest.mark.parametrize("function", [guided_log_probs, guided_argmax])
@pytest.mark.parametrize(
    ("current", "previous", "guidance", "error", "key"),
    [
        (3.0, torch.zeros(2, 3), 1.5, TypeError, "current"),
        (torch.zeros(2, 3), [1], 1.5, TypeError, "previous"),
        (torch.zeros(()), torch.zeros(()), 1.5, ValueError, "current"),
        (torch.zeros(2, 3), torch.zeros(3), 1.5, ValueError, "current and previous"),
        (torch.zeros(3), torch.zeros(3), -0.5, ValueError, "guidance"),
    ],
)
def test_argument_errors(function, current, previous, guidance, error, key):
    with pytest.raises(error, match=key):
        function(current, previous, guidance=guidance)
