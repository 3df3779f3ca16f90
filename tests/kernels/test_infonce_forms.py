"""info_nce_loss beyond one direction: against the formula term by term, and every backend x
dtype that has these forms against the float64 reference."""

import math
import weakref
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import raoe_kernels
from raoe_kernels import info_nce_loss
from raoe_kernels.infonce import OP, api, chunks, scan
from raoe_kernels.infonce.problem import Problem, mean_factor
from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.conftest import DEVICES
from tests.kernels.conftest import PLACES as TRITON_PLACES
from tests.kernels.contrast_cases import Recorder, rows
from tests.kernels.infonce_forms import cases, formula, loss_of
from tests.kernels.pairwise_cases import EVERY_DTYPE

PLACES = [(device, backend) for device in DEVICES for backend in ("reference", "scan")]
CASES = list(cases())
# Of one direction
IN_TRITON = ("plain", "symmetric", "mask", "in-batch", "hard", "all-hard", "guided", "guided-mask-hard")
JOINT_IN_TRITON = ("joint-four", "joint-four-targets-ids", "joint-both-mask", "joint-documents", "joint-positives")
SIZES = (6, 7, 14, 7)
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


@pytest.fixture(params=PLACES, ids=[f"{d}-{b}" for d, b in PLACES])
def place(request):
    return request.param


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Two or three rows at a time."""
    monkeypatch.setattr(scan, "BUFFER", 600)
    monkeypatch.setattr(chunks, "BUFFER", 600)
    monkeypatch.setattr(chunks, "ROWS", 2)


def leaves_of(dtype, given, device="cpu", learned=True, seed=0):
    """Anchors, positives, negatives, all_anchors where the case has them, and a learned scale."""
    made = rows(SIZES, 5, dtype, device, seed)
    made = made if "all_anchors" in given else made[:3]
    scale = torch.tensor(given.get("scale", 20.0), dtype=torch.float64, device=device).to(dtype)
    return [x.requires_grad_() for x in (*made, *([scale] if learned else []))]


def run(dtype, which, device, backend, learned=True):
    """The loss and all gradients, under an upstream gradient that is not 1. Rows and scale of a lower precision are
    rounded first, whatever they are computed in."""
    given = cases(device=device)[which]
    leaves = leaves_of(dtype, given, device, learned)
    loss = loss_of(info_nce_loss, leaves, given, learned, backend=backend)
    return loss.detach(), *torch.autograd.grad(loss * -1.5, leaves)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("which", CASES)
def test_against_the_formula(which, learned, place):
    device, backend = place
    given = cases(device=device)[which]
    leaves = leaves_of(torch.float64, given, device, learned)
    expected = loss_of(formula, leaves, given, learned)
    loss, *grads = run(torch.float64, which, device, backend, learned)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for x, y in zip(grads, torch.autograd.grad(expected * -1.5, leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("which", CASES)
def test_forward_mode_in_the_reference(which):
    """Guides leave rows without a negative; hardness is a constant in forward mode, too."""
    given = cases()[which]
    leaves = leaves_of(torch.float64, given)
    _, *grads = run(torch.float64, which, "cpu", "reference")
    with forward_ad.dual_level(), torch.no_grad():
        duals = [forward_ad.make_dual(x.detach(), x.detach().cos()) for x in leaves]
        found = forward_ad.unpack_dual(loss_of(info_nce_loss, duals, given, backend="reference")).tangent
    expected = sum((grad * x.detach().cos()).sum() for grad, x in zip(grads, leaves, strict=True)) / -1.5
    torch.testing.assert_close(found, expected)


@EVERY_DTYPE
@pytest.mark.parametrize("place", [here for here in PLACES if here[1] == "scan"], indirect=True, ids="-".join)
@pytest.mark.parametrize("which", CASES)
def test_against_the_reference(which, dtype, place, poisoned):
    by_the_rule(which, dtype, *place)


@pytest.fixture(params=[here for here in TRITON_PLACES if here[1] == "triton"], ids="-".join)
def triton_place(request):
    return request.param


@EVERY_DTYPE
@pytest.mark.parametrize("which", IN_TRITON)
def test_triton_against_the_reference(which, dtype, triton_place, poisoned):
    by_the_rule(which, dtype, *triton_place)


@pytest.mark.parametrize("which", JOINT_IN_TRITON)
def test_joint_directions_in_triton_against_the_reference(which, triton_place, poisoned):
    """Gradients have three roundings to bfloat16 of at most 2^-9: of the weights, of the rows that they multiply, and
    of the result. With so few rows one weight makes most of a gradient, so roundings do not average out."""
    by_the_rule(which, torch.bfloat16, *triton_place, learned=False, gradients=lambda x, p, t, spread: near(x, t))


def near(gradient, truth):
    assert (gradient.double().cpu() - truth.cpu()).norm() <= 4 * 2**-9 * truth.norm()


@pytest.mark.parametrize("spoiled", range(2))
def test_a_nan_of_the_guide_shows_in_triton(spoiled, triton_place):
    device, backend = triton_place
    leaves = [x.requires_grad_() for x in rows((6, 7), 5, torch.float32, device)]
    guide = rows((6, 7), 4, torch.float32, device)
    guide[spoiled][6 * spoiled, 1] = torch.nan
    loss = info_nce_loss(*leaves, guide=guide, backend=backend)
    assert loss.isnan() and all(x.isnan().all() for x in torch.autograd.grad(loss, leaves))


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.fixture
def multiplied(monkeypatch):
    """The dtypes that are multiplied where a CPU's rows of half precision count as a GPU's."""
    dtypes, product = set(), chunks.product

    def product_of(x, y, *to, **add):
        dtypes.update((x.dtype, y.dtype))
        return product(x, y, *to, **add)

    monkeypatch.setattr(chunks, "pays", lambda given: given.dtype.itemsize == 2)
    monkeypatch.setattr(chunks, "product", product_of)
    return dtypes


@pytest.mark.slow
@HALVES
@pytest.mark.parametrize("which", CASES)
def test_halves_against_the_reference(which, dtype, multiplied, poisoned):
    by_the_rule(which, dtype, "cpu", "scan")
    assert multiplied == {dtype, torch.bfloat16}


def by_the_rule(which, dtype, device, backend, learned=True, gradients=assert_gradient_accurate):
    given = cases()[which]
    ours = run(dtype, which, device, backend, learned)
    plain = run(dtype, which, "cpu", "reference", learned)
    leaves = [x.detach().double().requires_grad_() for x in leaves_of(dtype, given, learned=learned)]
    truth = loss_of(info_nce_loss, leaves, given, learned, backend="reference")
    truth = truth.detach(), *torch.autograd.grad(truth * -1.5, leaves)
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    spread = 2 * (given.get("scale", 20.0) + given.get("hardness_strength", 0.0))
    assert_loss_accurate(ours[0], plain[0], truth[0], spread)
    for x, p, t in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert x.dtype == dtype
        gradients(x, p, t, spread)


# Unit axes, of other norms than 1, and scale = log 3: exp(scale cos) is 3, 1 or 1/3.
LOG3 = math.log(3)


def test_a_guide_leaves_out_what_is_more_similar_than_the_pair_and_not_what_is_as_similar(place):
    device, backend = place
    rows_of = torch.eye(2, dtype=torch.float64, device=device)
    same = rows_of[[0, 0]]
    loss = info_nce_loss(rows_of, rows_of, scale=1.0, guide=(same, same), backend=backend)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)))


@pytest.mark.parametrize("wrong", [
    {"targets": torch.tensor([-1, 1])}, {"targets": torch.tensor([0, 2])}, {"learned_scale": torch.tensor(0.0)},
    {"learned_scale": torch.tensor(torch.nan)},
], ids=["below", "above", "zero", "nan"])  # fmt: skip
def test_what_a_gpu_is_not_asked_about_makes_the_loss_nan(wrong):
    units = torch.eye(2)
    assert mean_factor(Problem(units, units), torch.zeros(())).item() == 0.5
    assert mean_factor(Problem(units, units, **wrong), torch.zeros(())).isnan()


@pytest.mark.parametrize("more", [{"hardness_mode": "all_negatives", "hardness_strength": 500.0}, {"scale": 500.0}])
def test_any_exponent(more, place):
    """The negative is the anchor, the positive opposite; without what is subtracted exp would be infinite."""
    device, backend = place
    a = torch.tensor([[1.0, 0.0]], device=device)
    leaves = [x.requires_grad_() for x in (a.clone(), -a, a.clone())]
    if "scale" in more:
        more = {"scale": torch.tensor(more["scale"], device=device, requires_grad=True)}
        leaves.append(more["scale"])
    loss = info_nce_loss(*leaves[:3], backend=backend, **more)
    expected = 1000 if "scale" in more else 500 + 2 * 20.0
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    grads = torch.autograd.grad(loss, leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert "scale" not in more or grads[3].item() == pytest.approx(2, rel=1e-4)


@pytest.mark.parametrize(
    "which, bad",
    [*product(("all_anchors", "unused all_anchors", "guide", "scale"), (torch.nan, torch.inf)), ("scale", -3.0)],
)
def test_what_cannot_be_spoils_everything(which, bad, place):
    device, backend = place
    leaves = [*rows(SIZES, 5, torch.float32, device), torch.tensor(7.0, device=device)]
    guide = [torch.ones(len(x), 2, device=device) for x in (leaves[3], *leaves[1:3])]
    if which == "scale":
        leaves[4].fill_(bad)
    else:
        (guide[2] if which == "guide" else leaves[3])[4, 1] = bad
    leaves = [x.requires_grad_() for x in leaves]
    given = {"directions": FOUR[:1] if "unused" in which else FOUR, "guide": guide, "backend": backend}

    def call(a, p, n, q, scale):
        return info_nce_loss(a, p, n, all_anchors=q, scale=scale, **given)

    if which == "scale" and device == "cpu":
        with pytest.raises(ValueError, match=r"scale must be a finite number > 0, got (nan|inf|-3.0) "):
            call(*leaves)
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    loss = call(*leaves)
    assert loss.isnan() and all(grad.isnan().all() for grad in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("which", ["joint-four-targets-ids", "guided-hard", "guided-four"])
def test_no_matrix_of_logits_is_held(which, place, monkeypatch):
    device, backend = place
    monkeypatch.setattr(scan, "BUFFER", 3000)
    seeded, cells = torch.Generator().manual_seed(0), 80 * 240
    ids = [torch.randint(9, (size,), generator=seeded).to(device) for size in (80, 240)]
    given = {name: tuple(ids) if name == "ignore" else x for name, x in cases()[which].items()}
    given = {name: x for name, x in given.items() if name not in ("targets", "guide", "all_anchors")}
    if "guide" in which:
        given["guide"] = rows((80, 80, 160), 4, torch.float32, device)
    leaves = [x.requires_grad_() for x in rows((80, 80, 160), 4, torch.float32, device)]
    with Recorder() as seen:
        info_nce_loss(*leaves, backend=backend, **given).backward()
    if backend == "reference":
        assert seen.largest >= 4 * cells
    else:  # (N + C, D) in float32, or a row of the logits of all directions; a mask of all would be `cells` bytes
        assert seen.largest <= 4 * 320 * 4 < cells / 3


def test_triton_holds_the_weights_of_one_chunk(triton_place, monkeypatch):
    """On a GPU they are most of the memory."""
    device, backend = triton_place
    module = import_module("raoe_kernels.infonce.triton_fused")
    products, launched = module.info_nce_products, list[Any]()

    class Launches:
        def __getitem__(self, grid):
            def launch(rows, columns, weights, *more, **options):
                first = more[7]
                assert all(earlier() is None for start, earlier in launched if start != first)
                launched.append((first, weakref.ref(weights)))
                return products[grid](rows, columns, weights, *more, **options)

            return launch

    monkeypatch.setattr(module, "info_nce_products", Launches())
    leaves = [x.requires_grad_() for x in rows((6, 6, 8), 5, torch.bfloat16, device)]
    info_nce_loss(*leaves, directions=FOUR, scale=5.0, backend=backend).backward()
    assert [first for first, _ in launched] == [0, 0, 0, 0, 3, 3, 3, 3]


@pytest.mark.parametrize("which", CASES)
def test_triton_says_what_it_cannot(which, monkeypatch):
    pytest.importorskip("triton")
    given, seen = cases()[which], []
    leaves = leaves_of(torch.float32, given, learned=False)
    if which not in IN_TRITON and raoe_kernels.backends("cpu")["info_nce_loss"]["triton"] is True:
        with pytest.raises(RuntimeError, match=r"backend 'triton' cannot run info_nce_loss with .*; use backend="):
            loss_of(info_nce_loss, leaves, given, learned=False, backend="triton")
    monkeypatch.setattr(api, "info_nce", lambda problem, backend: seen.append(problem))
    loss_of(info_nce_loss, leaves, given, learned=False)
    assert OP.by_case(seen[0]) == ("triton" if which in IN_TRITON else "scan")
    info_nce_loss(*leaves[:3], symmetric=True, ignore=torch.zeros(6, 21) > 0)
    assert OP.by_case(seen[1]) == "triton"
