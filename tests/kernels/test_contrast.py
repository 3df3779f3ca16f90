"""What info_nce_loss and sigmoid_loss have in common: views, edges, dtypes, gradients, memory and compilation."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

from raoe_kernels.infonce import chunks
from tests.kernels.conftest import available
from tests.kernels.contrast_cases import DTYPES, HERE, IDS, INFONCE, SIGMOID, Recorder, rows, small_buffers


@pytest.fixture(params=[INFONCE, SIGMOID], ids=str)
def contrast(request):
    return request.param


@pytest.fixture(params=HERE, ids=IDS)
def place(request, contrast):
    return available(request.param, contrast.loss.__name__)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    small_buffers(monkeypatch)


def leaves_of(contrast, sizes, columns, dtype, device):
    return [x.requires_grad_() for x in contrast.leaves(rows(sizes, columns, dtype, device))]


def test_equal_ids_are_their_mask(contrast, place):
    device, backend = place
    inputs = rows((9, 9, 6), 10, torch.float64, device)
    ids = torch.arange(9, device=device) % 4, torch.arange(15, device=device) % 4
    for given in ({}, contrast.also) if contrast.also else ({},):
        by_ids, none = contrast.run(inputs, backend, ignore=ids, **given), contrast.run(inputs, backend, **given)
        assert by_ids[0] < none[0]
        for x, y in zip(by_ids, contrast.run(inputs, backend, ignore=ids[0][:, None] == ids[1], **given), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("which", [0, 1])
def test_gradcheck(which, contrast, place):
    device, backend = place
    given = contrast.options(contrast.mixed[which], 3, 6, device) | {"scale": 3.0}
    learned = {name: given.pop(name) for name in contrast.learned if name in given}
    leaves = [x.requires_grad_() for x in contrast.leaves(rows((3, 4, 2), 5, torch.float64, device), **learned)]
    assert torch.autograd.gradcheck(lambda *x: contrast(x, backend=backend, **given), leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_zero_rows_have_similarity_and_gradient_zero(dtype, contrast, place, poisoned):
    device, backend = place
    inputs = rows((6, 6, 4), 40, dtype, device)
    for x in inputs:
        x[1] = 0
        x[3] = 0 if dtype == torch.float16 else 1e-10
    given = contrast.also or {"bias": -1.0}
    loss, *grads = contrast.run(inputs, backend, **given)
    assert loss.isfinite()
    for grad in grads[:3]:
        assert grad.dtype == dtype
        assert grad[[1, 3]].eq(0).all() and grad[[0, 2]].ne(0).any(1).all()
    # two zero rows: log of how many columns there are, or what logits of only the bias cost
    bias = {name: math.log(3) for name in contrast.learned if name == "bias"}
    alone = contrast.run((inputs[0][1:2], inputs[1][1:2], inputs[2]), backend, **bias)[0]
    assert alone.item() == pytest.approx(math.log(4 / 3) + 4 * math.log(4) if bias else math.log(5), rel=1e-6)


@pytest.mark.parametrize("start, width", [(5, 33), (16, 32)])
def test_strides_and_views_do_not_matter(start, width, contrast, place, poisoned):
    device, backend = place
    here = slice(start, start + width)
    inputs = rows((7, 7, 5), width, torch.float64, device)
    given = contrast.options(contrast.mixed[0], 7, 12, device)
    expected = contrast.run(inputs, backend, **given)
    wide = torch.full((7, 80), 9.0, dtype=torch.float64, device=device)
    wide[:, here] = inputs[0]
    learned = {name: given.pop(name) for name in contrast.learned if name in given}
    leaves = [wide, inputs[1].t().contiguous(), inputs[2].repeat(2, 1), *contrast.leaves(inputs, **learned)[3:]]
    leaves = [x.requires_grad_() for x in leaves]
    given["targets"] = given["targets"].repeat_interleave(2)[::2]
    given["ignore"] = given["ignore"].t().contiguous().t()
    if "positive_ids" in given:
        given["positive_ids"] = tuple(ids.repeat_interleave(2)[::2] for ids in given["positive_ids"])
    loss = contrast([leaves[0][:, here], leaves[1].t(), leaves[2][:5], *leaves[3:]], backend=backend, **given)
    grads = torch.autograd.grad(loss * -1.5, leaves)
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-13, atol=0)
    found = grads[0][:, here], grads[1].t(), grads[2][:5], *grads[3:]
    for x, y in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-14)
    grads[0][:, here] = 0
    assert grads[0].eq(0).all() and grads[2][5:].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_no_anchors_and_no_columns(dtype, contrast, place):
    """Anchors without any column only where an anchor may be without a positive."""
    alone = [] if contrast.lowest == 0 else [(3, 0, 0)]
    for sizes in [(0, 0, None), (0, 3, 2), (0, 0, 0), *alone]:
        nothing_to_contrast(sizes, dtype, contrast, *place)


def nothing_to_contrast(sizes, dtype, contrast, device, backend):
    given = {"targets": torch.full(sizes[:1], contrast.lowest, device=device)} if sizes[1] == 0 and sizes[0] else {}
    inputs = rows(sizes, 4, dtype, device)
    loss, *grads = contrast.run(inputs, backend, **given, **contrast.also)
    assert loss.item() == 0 and loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for x, grad in zip([x for x in inputs if x is not None], grads, strict=False):
        assert grad.shape == x.shape and grad.dtype == dtype and grad.eq(0).all()
    learned = grads[len(grads) - len(contrast.learned) :]
    assert all(grad.ndim == 0 and grad.item() == 0 for grad in learned)


def test_no_negatives_and_no_width(contrast, place):
    device, backend = place
    a, p, n = rows((3, 3, 0), 4, torch.float64, device)
    loss, *grads = contrast.run((a, p, n), backend)
    alone = contrast.run((a, p), backend)
    assert torch.equal(loss, alone[0]) and torch.equal(grads[0], alone[1]) and grads[2].shape == (0, 4)
    bias = {name: 0.0 for name in contrast.learned if name == "bias"}
    loss, *grads = contrast.run([x[:, :0] for x in (a, p)], backend, **bias)
    assert loss.item() == pytest.approx(3 * math.log(2) if bias else math.log(3))
    assert [g.shape for g in grads[:2]] == [(3, 0), (3, 0)]


# each kind of bad number, and each of the inputs
@pytest.mark.parametrize("which, bad", [(0, torch.nan), (1, torch.inf), (2, 1e30), (2, torch.nan)])
def test_a_bad_row_spoils_everything(which, bad, contrast, place):
    device, backend = place
    inputs = rows((4, 4, 3), 8, torch.float32, device)
    inputs[which][2, 3] = bad
    # ignored by everybody where it may be: a row that is there is used
    ignore = torch.zeros(4, 7, dtype=torch.bool, device=device)
    ignore[:, 2 if which == 1 else 6] = True
    given = {"ignore": ignore}
    if contrast.lowest < 0:  # an anchor of its own that has no part in the loss
        ignore[2] = True
        given["targets"] = torch.tensor([0, 1, -1, 3], device=device)
    loss, *grads = contrast.run(inputs, backend, **given)
    assert loss.isnan() and all(grad.isnan().all() for grad in grads)


def test_targets_out_of_range(contrast, place):
    device, backend = place
    leaves = leaves_of(contrast, (3, 3), 8, torch.float32, device)

    def loss(targets):
        return contrast(leaves, targets=targets, backend=backend)

    torch._dynamo.reset()
    on_a_gpu = torch.compile(loss, fullgraph=True, backend="aot_eager") if device == "cpu" else loss
    for wrong in (3, contrast.lowest - 1):
        targets = torch.tensor([0, 1, wrong], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=rf"targets must be columns {contrast.lowest} … 2 .* got"):
                loss(targets)
        found = on_a_gpu(targets)
        assert found.isnan() and torch.autograd.grad(found, leaves[0])[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_multiplies_rows_in_its_dtype(dtype, contrast, place):
    """As torch's matrix products do; float64 stays, sums are float32, and so are gradients of float32 rows."""
    device, backend = place
    leaves = leaves_of(contrast, (5, 5, 4), 16, torch.float32, device)
    with torch.autocast(device, dtype=dtype):
        inside = contrast(leaves, backend=backend, **contrast.also)
        grads = torch.autograd.grad(inside, leaves)
        doubles = [x.detach().double() for x in leaves]
        exact = contrast(doubles, backend=backend, **contrast.also)
    assert inside.dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in grads)
    halves = [x.detach().to(dtype).requires_grad_() if x.ndim else x for x in leaves]
    plain = contrast(halves, backend=backend, **contrast.also)
    assert torch.equal(inside, plain)
    for x, y in zip(grads, torch.autograd.grad(plain, halves), strict=True):
        assert torch.equal(x, y.float())
    assert torch.equal(exact, contrast(doubles, backend=backend, **contrast.also)) and exact.dtype == torch.float64
    torch.testing.assert_close(inside.double(), exact, rtol=0, atol=40 * torch.finfo(dtype).eps)


def test_half_gradients_survive_loss_scaling(contrast, place):
    """What is kept for backward is float32 until the upstream factor is in it."""
    device, backend = place
    halves = rows((5, 5), 16, torch.float16, device)
    small = {"scale": 1e-6, **{name: 0.0 for name in contrast.learned if name == "bias"}}
    tiny = contrast.run(halves, backend, 2.0**18, **small)[1:3]
    for x, y in zip(tiny, contrast.run([x.float() for x in halves], backend, 2.0**18, **small)[1:3], strict=True):
        assert x.dtype == torch.float16
        torch.testing.assert_close(x.float(), y, rtol=1e-3, atol=1e-3 * y.abs().max().item())


def test_backward_twice_with_retain_graph_and_no_second_derivative(contrast, place):
    device, backend = place
    leaves = leaves_of(contrast, (4, 4), 6, torch.float32, device)
    loss = contrast(leaves, backend=backend)
    with pytest.raises(RuntimeError, match=f"{contrast.loss.__name__} has no second derivative"):
        torch.autograd.grad(loss, leaves[0], create_graph=True)
    loss.backward(retain_graph=True)
    once = leaves[0].grad.clone()
    loss.backward()
    assert torch.equal(leaves[0].grad, 2 * once) and once.ne(0).any()


def test_equal_calls_give_equal_bits_and_inputs_stay(contrast, place):
    device, backend = place
    inputs = rows((20, 20, 30), 24, torch.float32, device)
    given = contrast.options(contrast.mixed[0], 20, 50, device)
    before = [x.clone() for x in inputs]
    first, second = (contrast.run(inputs, backend, **given) for _ in range(2))
    # what the specification scatters on a GPU is added in any order
    same = torch.allclose if (device, backend) == ("cuda", "reference") else torch.equal
    assert all(same(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("which", ["plain", "ids", None])
def test_the_logits_are_never_held(which, contrast, place):
    device, backend = place
    leaves = leaves_of(contrast, (60, 60, 40), 4, torch.float32, device)
    given = contrast.options(which or contrast.mixed[1], 60, 100, device)
    for name in contrast.learned:
        given.pop(name, None)
    with Recorder() as seen:
        contrast(leaves, backend=backend, **given).backward()
    if backend == "reference":
        assert seen.largest >= 4 * 60 * 100
    else:  # the buffer of 2,400 bytes, and (C, D) float32, D to a multiple of 16; the logits are 24,000 bytes
        assert 4 * 100 * 4 <= seen.largest <= 4.5 * 4 * 100 * 4


def test_no_gradient_work_where_none_is_needed(monkeypatch, contrast, place):
    device, backend = place
    if backend == "reference":
        pytest.skip("it makes what it needs of what is there")
    monkeypatch.setattr(import_module(f"raoe_kernels.{contrast.key}.scan"), "BUFFER", 1 << 20)
    monkeypatch.setattr(chunks, "BUFFER", 1 << 20)
    inputs = contrast.leaves(rows((10, 10, 6), 4, torch.float32, device))

    def products(*needs, **given) -> int:
        """needs: of anchors, positives, negatives, and scale and bias where they are learned."""
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=False)]
        with Recorder() as seen:
            contrast(leaves, backend=backend, **given)
        return seen.products()

    none = (False,) * len(contrast.learned)
    assert products(False, False, False, *none) == 1
    assert products(True, False, False, *none) == products(False, False, True, *none) == 2
    assert products(True, True, True, *(not x for x in none)) == 3
    if contrast.also:  # the other direction's sums first; then all of the gradient from one matrix of weights
        assert products(True, True, True, **contrast.also) == (4 if backend == "triton" else 6)
    if none:
        assert products(False, False, False, False, True) == 1
        assert products(True, False, False, True, True) == products(False, False, True, False, True) == 2
        # scale's derivative is of the rows' product, or of the pass between the products
        assert products(False, False, False, True, False) == (1 if backend == "triton" else 2)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.no_grad(), Recorder() as seen:
        assert not contrast(leaves, backend=backend).requires_grad
    assert seen.products() == 1


@pytest.mark.parametrize("which", ["plain", "mask", None])
def test_opcheck(which, contrast, place, monkeypatch):
    device, backend = place
    inputs = rows((4, 5, None if which == "plain" else 3), 6, torch.float32, device)
    leaves = [x if x is None else x.requires_grad_() for x in contrast.leaves(inputs)]
    given = contrast.options(which or contrast.mixed[1], 4, 5 if which == "plain" else 8, device)
    for name in contrast.learned:
        given.pop(name, None)
    function, seen = contrast.loss.__name__.removesuffix("_loss"), []
    monkeypatch.setattr(f"raoe_kernels.{contrast.key}.api.{function}", lambda problem, backend: seen.append(problem))
    contrast(leaves, backend=backend, **given)
    needs = [x is not None for x in seen[0][:5]]
    operator = getattr(torch.ops.raoe_kernels, contrast.key)
    torch.library.opcheck(operator.default, (*seen[0], needs, backend))


def test_fullgraph_gives_the_same(contrast, place):
    """The graph has the operator, whatever its backend: each dtype is another backend's."""
    device, backend = place
    dtype = torch.bfloat16 if backend == "scan" else torch.float32
    torch._dynamo.reset()

    def step(leaves, ids):
        a, p, n, *learned = leaves
        more = {} if contrast.lowest == 0 else {"positive_ids": (ids[0], ids[0])}
        one = contrast([a * 1.0, p, n, *(x * 1.0 for x in learned)], ignore=ids, backend=backend, **contrast.also)
        return one * 2 + contrast([a, p, *learned], backend=backend, **more)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        leaves = [x.requires_grad_() for x in contrast.leaves(rows((n, n, 4), 8, dtype, device, seed=n))]
        ids = torch.arange(n, device=device) % 4, torch.arange(n + 4, device=device) % 4
        eager, traced = step(leaves, ids), compiled(leaves, ids)
        torch.testing.assert_close(traced, eager)
        for x, y in zip(torch.autograd.grad(traced, leaves), torch.autograd.grad(eager, leaves), strict=True):
            torch.testing.assert_close(x, y)


def test_auto_on_the_cpu_is_scan(contrast):
    leaves = contrast.leaves(rows((3, 3, 2), 4, torch.float32))
    assert torch.equal(contrast(leaves), contrast(leaves, backend="scan"))
