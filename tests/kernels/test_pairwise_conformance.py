"""Every pairwise op x backend x dtype against the float64 reference, by the one rule of raoe_kernels.testing."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.conftest import PLACES
from tests.kernels.pairwise_cases import CASES, EVERY_DTYPE, PARTS, Case


def inputs_of(case: Case, dtype: torch.dtype, device: str = "cpu", widths: bool = False) -> list[torch.Tensor]:
    """The case's; widths: (3, B) similarities, the case's, ones that spread less, and ones that spread far more."""
    c, *others = case.inputs(dtype, device)
    return [torch.stack([c, c.flip(0) * 0.5, c * 40]) if widths else c, *others]


def run(case: Case, inputs, backend: str):
    """(losses stacked, gradient of similarity under upstream gradients that are not 1)."""
    similarity = inputs[0].clone().requires_grad_()
    result = case.call(similarity, *inputs[1:], backend=backend)
    losses = torch.stack(result if isinstance(result, tuple) else [result])
    upstream = torch.linspace(-2.5, 0.7, losses.numel(), dtype=losses.dtype, device=losses.device)
    (losses * upstream.view(losses.shape)).sum().backward()
    return losses.detach(), similarity.grad


def agrees(
    case: Case, dtype: torch.dtype, place: tuple[str, str], exact: str = "reference", widths: bool = False
) -> None:
    """By the one rule: against float64 and the dtype itself on the CPU, by the specification or, for its B^2 of many
    pairs, by scan."""
    device, backend = place
    inputs = inputs_of(case, dtype, device, widths)
    kept = [x.clone() for x in inputs]
    losses, grad = run(case, inputs, backend)
    on_cpu = inputs_of(case, dtype, widths=widths)
    truth, true_grad = run(case, (on_cpu[0].double(), *on_cpu[1:]), exact)
    plain, plain_grad = run(case, on_cpu, exact)
    assert losses.shape == truth.shape and losses.shape[1:] == grad.shape[:-1] and grad.shape == inputs[0].shape
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype and losses.device.type == grad.device.type == device
    for row in range(3) if widths else [...]:
        exponents = case.exponent_range(on_cpu[0][row], truth[:, row])
        for part in range(len(truth)):
            assert_loss_accurate(losses[part, row], plain[part, row], truth[part, row], exponents)
        assert_gradient_accurate(grad[row], plain_grad[row], true_grad[row], exponents)
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True)), "inputs were modified"


@EVERY_DTYPE
@pytest.mark.parametrize("case", CASES + PARTS, ids=lambda c: c.name)
def test_against_the_reference(case, dtype, place, poisoned):
    agrees(case, dtype, place)


@pytest.mark.parametrize("place", [p for p in PLACES if p[1] != "triton"], indirect=True, ids="-".join)
@pytest.mark.parametrize("classes, levels", [(3, 0.3), (20, 0.3), (0, 0)])
def test_several_tiles(place, classes, levels, poisoned):
    """A size beyond the native backend's one-block path, and runs that reach over several tiles (of five levels); the
    reference visits every two pairs. At this scale every pair has a share that can be seen."""
    pairs = 2001 if place[1] == "reference" else 9001
    options = {"return_parts": True, "scale": 2.0}
    case = Case(f"tiles-{classes}", "raoe_loss", pairs, options, levels=int(levels * pairs) or 5, classes=classes)
    agrees(case, torch.float32, place, "scan")


@pytest.mark.parametrize("place", [p for p in PLACES if p[1] != "reference"], indirect=True, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("classes", [3, 40])
@pytest.mark.parametrize("pairs", [600, 1500, 2600])
def test_every_size_of_block(place, pairs, classes, dtype, poisoned):
    """Those that conformance's small batches do not fill, against a backend that knows no blocks."""
    case = Case(f"block-{pairs}-{classes}", "raoe_loss", pairs, levels=pairs // 4, classes=classes)
    if place[1] == "triton" and pairs > (2048 if dtype == torch.float32 else 1024):
        with pytest.raises(RuntimeError, match=f"'triton' cannot run a pairwise loss of {pairs:,} pairs"):
            run(case, inputs_of(case, dtype, place[0]), "triton")
    else:
        agrees(case, dtype, place, "scan")
