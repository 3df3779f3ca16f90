"""Every pairwise op x backend x dtype against the float64 reference, by the one rule of raoe_kernels.testing."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.conftest import PLACES
from tests.kernels.pairwise_cases import CASES, DTYPES, PARTS, Case

UPSTREAM = 0.7, -2.5  # gradients from above that are not 1


def run(case: Case, inputs, backend: str):
    """(losses stacked, gradient of similarity under UPSTREAM)."""
    similarity = inputs[0].clone().requires_grad_()
    result = case.call(similarity, *inputs[1:], backend=backend)
    losses = torch.stack(result if isinstance(result, tuple) else [result])
    weights = losses.new_tensor(UPSTREAM[: len(losses)])
    (losses * weights).sum().backward()
    return losses.detach(), similarity.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES + PARTS, ids=lambda c: c.name)
def test_against_the_reference(case, dtype, place, poisoned):
    device, backend = place
    inputs = case.inputs(dtype, device)
    kept = [x.clone() for x in inputs]
    losses, grad = run(case, inputs, backend)

    on_cpu = case.inputs(dtype)
    truth, true_grad = run(case, (on_cpu[0].double(), *on_cpu[1:]), "reference")
    plain, plain_grad = run(case, on_cpu, "reference")
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype and losses.device.type == grad.device.type == device
    exponents = case.exponent_range(on_cpu[0], truth)
    for one, plain_one, true_one in zip(losses, plain, truth, strict=True):
        assert_loss_accurate(one, plain_one, true_one, exponents)
    assert_gradient_accurate(grad, plain_grad, true_grad, exponents)
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True)), "inputs were modified"


@pytest.mark.parametrize("place", [p for p in PLACES if p[1] != "triton"], indirect=True, ids="-".join)
def test_several_tiles(place, poisoned):
    """A size beyond the native backend's one-block path; the reference visits every two pairs."""
    device, backend = place
    pairs = 2001 if backend == "reference" else 9001
    for classes, levels in ((3, pairs // 3), (20, pairs // 3), (0, 5)):  # the last: runs reach over several tiles
        options = {"return_parts": True, "scale": 2.0}  # a scale at which every pair has a share that can be seen
        case = Case(f"tiles-{classes}", "raoe_loss", pairs, options, levels=levels, classes=classes)
        inputs = case.inputs(torch.float32, device)
        losses, grad = run(case, inputs, backend)
        on_cpu = case.inputs(torch.float32)
        truth, true_grad = run(case, (on_cpu[0].double(), *on_cpu[1:]), "scan")  # the reference's B^2 is too much
        plain, plain_grad = run(case, on_cpu, "scan")
        exponents = case.exponent_range(on_cpu[0], truth)
        for one, plain_one, true_one in zip(losses, plain, truth, strict=True):
            assert_loss_accurate(one, plain_one, true_one, exponents)
        assert_gradient_accurate(grad, plain_grad, true_grad, exponents)


@pytest.mark.parametrize("classes", [3, 40])
@pytest.mark.parametrize("pairs", [600, 1500, 2600])
def test_every_size_of_block(place, pairs, classes, poisoned):
    """Those that conformance's small batches do not fill, against a backend that knows no blocks."""
    device, backend = place
    for dtype in (torch.float32, torch.float64):
        case = Case(f"block-{pairs}-{classes}", "raoe_loss", pairs, levels=pairs // 4, classes=classes)
        if backend == "triton" and pairs > (2048 if dtype == torch.float32 else 1024):
            with pytest.raises(RuntimeError, match=f"'triton' cannot run a pairwise loss of {pairs:,} pairs"):
                run(case, case.inputs(dtype, device), backend)
            continue
        losses, grad = run(case, case.inputs(dtype, device), backend)
        on_cpu = case.inputs(dtype)
        truth, true_grad = run(case, (on_cpu[0].double(), *on_cpu[1:]), "scan")
        plain, plain_grad = run(case, on_cpu, "scan")
        exponents = case.exponent_range(on_cpu[0], truth)
        assert_loss_accurate(losses[0], plain[0], truth[0], exponents)
        assert_gradient_accurate(grad, plain_grad, true_grad, exponents)
