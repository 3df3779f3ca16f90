"""Every pairwise op x backend x dtype against the float64 reference, by the one rule of raoe_kernels.testing."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raoe_kernels import raoe_loss
from raoe_kernels.pairwise import OP, scan
from raoe_kernels.pairwise.problem import Problem, constants
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
        with pytest.raises(RuntimeError, match=f"'triton' supports at most .* got {pairs:,}"):
            run(case, inputs_of(case, dtype, place[0]), "triton")
    else:
        agrees(case, dtype, place, "scan")


NARROW = torch.tensor([0.5, -0.0, 0.0, 1.0, 1 + 1e-15, math.inf, -math.inf, 0.5, -5e-324] * 5, dtype=torch.float64)
LARGE = torch.tensor([2**60, 2**60 + 1, -(2**63)] * 15)


@pytest.mark.parametrize("ties", ["average", "min", "max", "dense", "ordinal"])
@pytest.mark.parametrize("scores", [NARROW, LARGE])
def test_ranks_give_the_bits_of_the_scores(scores, ties, place):
    """Pair losses of raoe_train replace the scores by ranks."""
    device, backend = place
    ranks = torch.unique(scores, return_inverse=True)[1].float()
    similarity, _, labels = Case("ranks", "raoe_loss", len(scores)).inputs(torch.float32, device)
    similarity.requires_grad_()
    results = []
    for each in (scores, ranks):
        parts = raoe_loss(similarity, each.to(device), labels, ties=ties, return_parts=True, backend=backend)
        results.append([*parts, *torch.autograd.grad(sum(parts), similarity)])
    assert all(torch.equal(*both) for both in zip(*results, strict=True)) and results[0][1] > 0


@pytest.mark.parametrize("place", [p for p in PLACES if p[1] == "triton"], indirect=True, ids="-".join)
@pytest.mark.parametrize("score_dtype", [torch.float64, torch.int64])
def test_triton_replaces_many_wide_scores_by_ranks(place, score_dtype, monkeypatch):
    from raoe_kernels.pairwise import triton_kernels

    ranked, ranks = [], triton_kernels._dense_ranks
    monkeypatch.setattr(triton_kernels, "_dense_ranks", lambda scores: ranked.append(len(scores)) or ranks(scores))
    for pairs in (1024, 1100):
        case = Case("wide", "raoe_loss", pairs, levels=300, score_dtype=score_dtype)
        agrees(case, torch.float32, place, "scan")
    assert ranked == [1100]
    c, scores, labels = inputs_of(case, torch.float32, place[0])
    nan = scores.double().index_fill(0, torch.tensor([5], device=place[0]), math.nan)
    assert case.call(c, nan, labels, backend="triton").isnan()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2048), (torch.float32, 2048), (torch.float64, 1024)])
@pytest.mark.parametrize("score_dtype", [torch.float32, torch.float64, torch.int64])
def test_auto_takes_triton_for_as_many_pairs_as_it_can(dtype, limit, score_dtype):
    for pairs, chosen in ((limit, "triton"), (limit + 1, "scan")):
        similarity, *keys = Case("auto", "raoe_loss", pairs, score_dtype=score_dtype).inputs(dtype)
        assert OP.by_case(Problem(similarity, *keys, *constants(True, True, 20.0))) == chosen


ANGULAR = ("gated_angular_loss", "raoe_loss")


@pytest.mark.parametrize("levels_at_once", [20, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [c for c in CASES + PARTS if c.op in ANGULAR], ids=lambda c: c.name)
def test_scan_without_the_number_of_labels(case, dtype, levels_at_once, monkeypatch):
    """Devices other than a CPU never read this number, so few labels must not need it."""
    monkeypatch.setattr(scan, "MASKED_CLASSES", 0)
    monkeypatch.setattr(scan, "LEVELS_AT_ONCE", levels_at_once)
    monkeypatch.setattr(scan, "ELEMENTS_AT_ONCE", 0)
    agrees(case, dtype, ("cpu", "scan"))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def test_scan_takes_few_operations_on_a_device():
    """Each is a launch there: 924 when sums over labels doubled their reach in every level."""
    case = Case("operations", "raoe_loss", 512, score_dtype=torch.float64)
    similarity, *others = inputs_of(case, torch.float32, "meta")
    with Operations() as operations:
        case.call(similarity.requires_grad_(), *others, backend="scan").backward()
    assert operations.count <= 190
