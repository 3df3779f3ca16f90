"""sigmoid_loss: every backend x dtype against the float64 reference, tiny cases by hand, its options and edges."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import raoe_kernels
from raoe_kernels import sigmoid_loss
from raoe_kernels.infonce import chunks
from raoe_kernels.sigmoid import scan
from raoe_kernels.testing import (
    GRADIENT_FACTOR,
    ULPS,
    assert_accurate,
    assert_gradient_accurate,
    assert_loss_accurate,
)
from tests.kernels.conftest import HAS_GPU, PLACES
from tests.kernels.test_infonce import Recorder, rows

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HERE = [place for place in PLACES if place[1] != "native"]
LOG2, LOG3 = math.log(2), math.log(3)


@pytest.fixture(params=HERE, ids=[f"{d}-{b}" for d, b in HERE])
def place(request):
    device, backend = request.param
    reason = raoe_kernels.backends(device)["sigmoid_loss"][backend]
    if reason is not True:
        pytest.skip(f"{backend} on {device}: {reason}")
    return request.param


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Buffers and blocks of a few rows, so that small batches have whole chunks and a ragged one."""
    monkeypatch.setattr(scan, "BUFFER", 2400)
    monkeypatch.setattr(scan, "BLOCK", 900)
    monkeypatch.setattr(chunks, "BUFFER", 2400)
    monkeypatch.setattr(chunks, "ROWS", 1)
    if not HAS_GPU and find_spec("triton"):
        from raoe_kernels.infonce import triton_units
        from raoe_kernels.sigmoid import triton_kernels

        monkeypatch.setitem(triton_kernels.WEIGHTS, "BLOCK", 32)
        monkeypatch.setitem(triton_units.ROWS, "BLOCK", 64)


def numbers(tau, bias, like):
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return [torch.tensor(x, dtype=dtype, device=like.device) for x in (tau, bias)]


def run(inputs, backend, upstream=-1.5, tau=10.0, bias=-10.0, **options):
    """The loss, and the gradients of the inputs there are, of tau and of bias, under an upstream that is not 1."""
    given = [*inputs, *([None] * (3 - len(inputs))), *numbers(tau, bias, inputs[0])]
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    loss = sigmoid_loss(*leaves[:3], tau=leaves[3], bias=leaves[4], backend=backend, **options)
    return loss.detach(), *torch.autograd.grad(loss * upstream, [x for x in leaves if x is not None])


def options(which, n, columns, device="cpu"):
    """Optional arguments by name; some anchors share a positive, some have none, and ids and mask hit positives too."""
    seeded = torch.Generator().manual_seed(1)
    targets = torch.randint(-1, columns, (n,), generator=seeded)
    targets[: n // 2] = targets[0]
    targets[-1] = -1
    mask = torch.rand(n, columns, generator=seeded) < 0.3
    mask[torch.arange(n), targets.clamp(min=0)] = True
    pairs = [(torch.randint(4, (n,), generator=seeded), torch.randint(4, (columns,), generator=seeded)) for _ in "ab"]
    table = {
        "plain": {},
        "soft": {"tau": 2.0, "bias": 0.5},
        "targets": {"targets": targets, "tau": 5.0, "bias": -1.0},
        "mask": {"ignore": mask},
        "ids": {"ignore": pairs[0]},
        "groups": {"positive_ids": pairs[0], "bias": -3.0},
        "mask-targets-groups": {"ignore": mask, "targets": targets, "positive_ids": pairs[0], "bias": 1.0},
        "ids-targets-groups": {"ignore": pairs[0], "targets": targets, "positive_ids": pairs[1], "tau": 60.0},
    }

    def move(value):
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in table[which].items()}


# (anchors, positives, negatives), columns: one row, no negatives, ragged blocks and chunks, aligned and odd widths.
SHAPES = [
    ((1, 1, None), 3, "plain"),
    ((5, 5, None), 7, "plain"),
    ((3, 4, 130), 48, "soft"),
    ((2, 3, None), 384, "plain"),
    ((35, 38, None), 16, "groups"),
    ((5, 5, 3), 129, "mask"),
    ((36, 3, 60), 16, "targets"),
    ((36, 40, 3), 20, "mask-targets-groups"),
    ((17, 17, 70), 80, "ids"),
    ((20, 2, 30), 48, "ids-targets-groups"),
    pytest.param((9, 9, 5), 385, "mask", marks=pytest.mark.slow),
    pytest.param((66, 70, 80), 160, "ids-targets-groups", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("sizes, width, which", SHAPES, ids=lambda x: str(x).replace(" ", ""))
def test_against_the_reference(sizes, width, which, dtype, place, poisoned):
    device, backend = place
    inputs = rows(sizes, width, dtype)
    n, columns = sizes[0], sizes[1] + (sizes[2] or 0)
    given = options(which, n, columns)
    ours = run(rows(sizes, width, dtype, device), backend, **options(which, n, columns, device))
    plain = run(inputs, "reference", **given)
    truth = run([None if x is None else x.double() for x in inputs], "reference", **given)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert ours[0].dtype == wide
    spread = 2 * given.get("tau", 10.0)
    assert_loss_accurate(ours[0], plain[0], truth[0], spread)
    for x, p, t in zip(ours[1:-2], plain[1:], truth[1:], strict=False):
        assert x.dtype == dtype
        assert_gradient_accurate(x, p, t, spread)
    # Sums of what has both signs are rounded at the size of their terms; a pair's derivative is at most its loss.
    floor = ULPS * torch.finfo(wide).eps * (1 + spread) * 1.5 * truth[0].item()
    for x, p, t in zip(ours[-2:], plain[-2:], truth[-2:], strict=True):
        assert x.dtype == wide
        assert_accurate("gradient", x, p, t, factor=GRADIENT_FACTOR, floor=floor)


# Unit axes at an angle of 90 degrees, of other norms than 1, and tau = log 3. Without a bias the sigmoid of a cosine of
# 1, 0 and -1 is 3/4, 1/2 and 1/4; with a bias of log 3 it is 9/10, 3/4 and 1/2.
ANCHORS, POSITIVES, NEGATIVES = [[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]], [[0.0, -5.0]]


def by_hand(device, *matrices):
    return [torch.tensor(x, dtype=torch.float64, device=device) for x in matrices]


@pytest.mark.parametrize(
    "negatives, bias, given, expected",
    [
        (False, 0.0, {}, math.log(4 / 3) + LOG2),
        (True, 0.0, {}, math.log(4 / 3) + LOG2 + (LOG2 + math.log(4 / 3)) / 2),
        (False, LOG3, {}, math.log(10 / 9) + math.log(4)),
        (True, LOG3, {}, math.log(10 / 9) + math.log(4) + (math.log(4) + LOG2) / 2),
        (False, 0.0, {"targets": [1, 0]}, LOG2 + math.log(4)),
        (False, LOG3, {"targets": [0, 0]}, (math.log(10 / 9) + math.log(4) + math.log(4 / 3) + math.log(10)) / 2),
        (False, LOG3, {"targets": [-1, 1]}, (math.log(10) + math.log(4) + math.log(10 / 9) + math.log(4)) / 2),
        (False, 0.0, {"ignore": [[0, 1], [0, 0]]}, math.log(4 / 3) + LOG2 / 2),
        (False, 0.0, {"ignore": [[1, 1], [1, 1]]}, math.log(4 / 3)),  # nothing is left but the positive
        (False, 0.0, {"ignore": [[1, 1], [1, 1]], "targets": [-1, -1]}, 0.0),
        (False, 0.0, {"ignore": ([7, 8], [9, 7])}, math.log(4 / 3) + LOG2 / 2),
        (False, LOG3, {"positive_ids": ([5, 6], [5, 5])}, math.log(10 / 9) + (math.log(4 / 3) + math.log(4)) / 2),
        (False, LOG3, {"positive_ids": ([5, 6], [5, 5]), "ignore": [[1, 1], [1, 1]]},
         math.log(10 / 9) + math.log(4 / 3) / 2),
        (False, LOG3, {"positive_ids": ([5, 6], [7, 5]), "targets": [-1, -1]},
         (math.log(10) + math.log(4 / 3) + math.log(4) + math.log(10)) / 2),
    ],
)  # fmt: skip
def test_by_hand(negatives, bias, given, expected, place):
    device, backend = place
    tensor = {"device": device, "dtype": torch.int64}
    given = {
        name: tuple(torch.tensor(ids, **tensor) for ids in x) if isinstance(x, tuple) else torch.tensor(x, **tensor)
        for name, x in given.items()
    }
    if isinstance(given.get("ignore"), torch.Tensor):
        given["ignore"] = given["ignore"].bool()
    inputs = by_hand(device, ANCHORS, POSITIVES, *([NEGATIVES] if negatives else []))
    loss = sigmoid_loss(*inputs, tau=LOG3, bias=bias, backend=backend, **given)
    assert loss.item() == pytest.approx(expected, abs=1e-14)


def test_gradient_by_hand(place):
    device, backend = place
    _, by_anchors, by_positives, by_tau, by_bias = run(
        by_hand(device, ANCHORS, POSITIVES), backend, upstream=1.0, tau=LOG3, bias=0.0
    )
    # dloss/dlogit is (3/4 - 1) / 2 at the positive and (1/2) / 2 at the other: each row is pushed from the other one,
    # tau times; what points along the row itself is projected away, and the rest divided by the row's norm
    assert by_anchors.flatten().tolist() == pytest.approx([0, LOG3 / 4, LOG3 / 4 / 2, 0], abs=1e-15)
    assert by_positives.flatten().tolist() == pytest.approx([0, LOG3 / 4 / 3, LOG3 / 4, 0], abs=1e-15)
    assert by_tau.item() == pytest.approx(-1 / 4) and by_bias.item() == pytest.approx(1 / 4)


def test_is_open_clips_loss(place):
    """Of one process: mlfoundations/open_clip 89fb801, SigLipLoss._loss, is this of features over their norms, the
    scale's exponential and the bias."""
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((6, 6), 20, torch.float64, device))
    tau, bias = (x.requires_grad_() for x in numbers(10.0, -10.0, a))
    labels = 2 * torch.eye(6, device=device) - 1
    expected = -F.logsigmoid(labels * (tau * F.normalize(a) @ F.normalize(p).T + bias)).sum() / 6
    loss = sigmoid_loss(a, p, tau=tau, bias=bias, backend=backend)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    leaves = (a, p, tau, bias)
    for x, y in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-14)


def test_numbers_are_tensors_that_nobody_learns(place):
    device, backend = place
    a, p = rows((5, 6), 7, torch.float32, device)
    tau, bias = numbers(3.5, -2.25, a)
    assert torch.equal(
        sigmoid_loss(a, p, tau=3.5, bias=-2.25, backend=backend),
        sigmoid_loss(a, p, tau=tau, bias=bias, backend=backend),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_learnt_may_have_a_dtype_of_its_own(dtype, place):
    device, backend = place
    a, p = rows((5, 5), 7, dtype, device)
    tau, bias = torch.tensor(3.0, device=device, requires_grad=True), torch.zeros((), device=device).double()
    loss = sigmoid_loss(a, p, tau=tau, bias=bias.requires_grad_(), backend=backend)
    by_tau, by_bias = torch.autograd.grad(loss, (tau, bias))
    assert by_tau.dtype == torch.float32 and by_bias.dtype == torch.float64
    truth = run([a.double(), p.double()], "reference", 1.0, tau=3.0, bias=0.0)
    assert by_tau.item() == pytest.approx(truth[3].item(), rel=1e-4)
    assert by_bias.item() == pytest.approx(truth[4].item(), rel=1e-4)


def test_columns_may_come_in_parts(place):
    """Each part is a loss without positives, but for the one that has them: batches are gathered part by part."""
    device, backend = place
    a, p, n = rows((8, 8, 5), 12, torch.float64, device)
    whole = run((a, p, n), backend)
    own, none = torch.arange(4, 8, device=device), torch.full((4,), -1, device=device)
    upper = run((a[4:], p, n), backend, targets=own)
    parts = [(p[4:], own - 4), (p[:4], none), (n, none)]
    found = [run((a[4:], columns), backend, targets=targets) for columns, targets in parts]
    torch.testing.assert_close(sum(part[0] for part in found), upper[0], rtol=1e-13, atol=0)
    for i in (1, -2, -1):  # of the anchors, of tau and of the bias
        torch.testing.assert_close(sum(part[i] for part in found), upper[i], rtol=1e-11, atol=1e-14)
    lower = run((a[:4], p, n), backend)
    torch.testing.assert_close((lower[0] + upper[0]) / 2, whole[0], rtol=1e-13, atol=0)
    for x, y, z in zip(lower[2:], upper[2:], whole[2:], strict=True):
        torch.testing.assert_close((x + y) / 2, z, rtol=1e-11, atol=1e-14)


def test_equal_ids_are_their_mask(place):
    device, backend = place
    inputs = rows((9, 9, 6), 10, torch.float64, device)
    ids = torch.arange(9, device=device) % 4, torch.arange(15, device=device) % 4
    by_ids, none = run(inputs, backend, ignore=ids), run(inputs, backend)
    assert by_ids[0] < none[0]
    for x, y in zip(by_ids, run(inputs, backend, ignore=ids[0][:, None] == ids[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("which", ["mask-targets-groups", "ids-targets-groups"])
def test_gradcheck(which, place):
    device, backend = place
    inputs = rows((3, 4, 2), 5, torch.float64, device)
    given = {**options(which, 3, 6, device), "tau": 3.0, "bias": -1.0}
    leaves = [x.requires_grad_() for x in (*inputs, *numbers(given.pop("tau"), given.pop("bias"), inputs[0]))]
    assert torch.autograd.gradcheck(
        lambda a, p, n, tau, bias: sigmoid_loss(a, p, n, tau=tau, bias=bias, backend=backend, **given),
        leaves,
        fast_mode=True,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_zero_rows_have_similarity_and_gradient_zero(dtype, place, poisoned):
    device, backend = place
    inputs = rows((6, 6, 4), 40, dtype, device)
    for x in inputs:
        x[1] = 0
        x[3] = 0 if dtype == torch.float16 else 1e-10
    loss, *grads = run(inputs, backend, bias=-1.0)
    assert loss.isfinite()
    for grad in grads[:3]:
        assert grad[[1, 3]].eq(0).all() and grad[[0, 2]].ne(0).any(1).all()
    alone = sigmoid_loss(inputs[0][1:2], inputs[1][1:2], inputs[2], bias=LOG3, backend=backend)
    assert alone.item() == pytest.approx(math.log(4 / 3) + 4 * math.log(4), rel=1e-6)


def test_a_small_loss_keeps_its_digits(place):
    device, backend = place
    a = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], device=device)
    loss, _, _, by_tau, by_bias = run((a, a), backend, upstream=1.0, tau=40.0, bias=5.0)
    # logits 45 at the positive and -35 at the other
    assert loss.item() == pytest.approx(math.exp(-45) + math.exp(-35), rel=1e-5, abs=0)
    assert by_bias.item() == pytest.approx(math.exp(-35) - math.exp(-45), rel=1e-5, abs=0)
    assert by_tau.item() == pytest.approx(-math.exp(-35) - math.exp(-45), rel=1e-5, abs=0)


@pytest.mark.parametrize("tau", [1e-3, 30.0, 100.0, 1000.0])
def test_any_tau(tau, place):
    device, backend = place
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    # the positive is opposite, and the negative the anchor itself: tau each; and two that are at right angles
    loss, *grads = run((a, -a, a), backend, tau=tau, bias=0.0)
    assert loss.item() == pytest.approx(2 * tau + 2 * math.log1p(math.exp(-tau)) + 2 * LOG2, rel=1e-6)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[3].item() == pytest.approx(-1.5 * 2 / (1 + math.exp(-tau)), rel=1e-5)


@pytest.mark.parametrize("needs", [(1, 0, 0, 0, 0), (0, 1, 0, 0, 1), (0, 0, 1, 1, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1),
                                   (0, 1, 1, 0, 0), (0, 0, 0, 0, 0), (1, 1, 0, 1, 1)])  # fmt: skip
def test_partial_gradients(needs, place, poisoned):
    device, backend = place
    inputs = rows((4, 5, 3), 9, torch.float64, device)
    targets = torch.tensor([7, 1, 1, -1], device=device)
    expected = run(inputs, backend, upstream=1.0, targets=targets)
    leaves = [*inputs, *numbers(10.0, -10.0, inputs[0])]
    for x, need in zip(leaves, needs, strict=True):
        x.requires_grad_(bool(need))
    loss = sigmoid_loss(*leaves[:3], tau=leaves[3], bias=leaves[4], targets=targets, backend=backend)
    assert loss.requires_grad == any(needs) and torch.equal(loss.detach(), expected[0])
    if any(needs):
        loss.backward()
    for x, need, grad in zip(leaves, needs, expected[1:], strict=True):
        if need:
            torch.testing.assert_close(x.grad, grad, rtol=1e-12, atol=1e-16)
        else:
            assert x.grad is None


def test_strides_and_views_do_not_matter(place, poisoned):
    device, backend = place
    inputs = rows((7, 7, 5), 33, torch.float64, device)
    given = options("mask-targets-groups", 7, 12, device)
    expected = run(inputs, backend, **given)
    wide = torch.full((7, 80), 9.0, dtype=torch.float64, device=device)
    wide[:, 5:38] = inputs[0]
    pair = tuple(ids.repeat_interleave(2)[::2] for ids in given["positive_ids"])
    found = run((wide[:, 5:38], inputs[1].t().contiguous().t(), inputs[2].repeat(2, 1)[:5]), backend,
                targets=given["targets"].repeat_interleave(2)[::2], ignore=given["ignore"].t().contiguous().t(),
                positive_ids=pair, bias=given["bias"])  # fmt: skip
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("sizes", [(0, 0, None), (0, 3, 2), (0, 0, 0), (3, 0, 0)])
def test_no_anchors_and_no_columns(sizes, dtype, place):
    device, backend = place
    inputs = rows(sizes, 4, dtype, device)
    loss, *grads = run(inputs, backend, targets=torch.full((sizes[0],), -1, device=device))
    assert loss.item() == 0 and loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for x, grad in zip([x for x in inputs if x is not None], grads, strict=False):
        assert grad.shape == x.shape and grad.dtype == dtype and grad.eq(0).all()
    assert all(grad.ndim == 0 and grad.item() == 0 for grad in grads[-2:])


def test_no_negatives_and_no_width(place):
    device, backend = place
    a, p, n = rows((3, 3, 0), 4, torch.float64, device)
    loss, *grads = run((a, p, n), backend)
    alone = run((a, p), backend)
    assert torch.equal(loss, alone[0]) and torch.equal(grads[0], alone[1]) and grads[2].shape == (0, 4)
    loss, *grads = run([x[:, :0] for x in (a, p)], backend, bias=0.0)
    assert loss.item() == pytest.approx(3 * LOG2) and [g.shape for g in grads[:2]] == [(3, 0), (3, 0)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_bad_row_spoils_everything(which, bad, place):
    device, backend = place
    inputs = rows((4, 4, 3), 8, torch.float32, device)
    inputs[which][2, 3] = bad
    # ignored by everybody where it may be: a row that is there is used
    ignore = torch.zeros(4, 7, dtype=torch.bool, device=device)
    ignore[:, 2 if which == 1 else 6] = True
    ignore[2] = True
    loss, *grads = run(inputs, backend, ignore=ignore, targets=torch.tensor([0, 1, -1, 3], device=device))
    assert loss.isnan() and all(grad.isnan().all() for grad in grads)


def test_targets_out_of_range(place):
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((3, 3), 8, torch.float32, device))
    for wrong in (3, -2):
        targets = torch.tensor([0, 1, wrong], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=r"targets must be columns -1 … 2 .* got"):
                sigmoid_loss(a, p, targets=targets, backend=backend)
        call = torch.compile(sigmoid_loss, fullgraph=True, backend="aot_eager") if device == "cpu" else sigmoid_loss
        loss = call(a, p, targets=targets, backend=backend)
        assert loss.isnan() and torch.autograd.grad(loss, a)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype, place):
    device, backend = place
    a, p, n = (x.requires_grad_() for x in rows((5, 5, 4), 16, torch.float32, device))
    outside = sigmoid_loss(a, p, n, backend=backend)
    with torch.autocast(device, dtype=dtype):
        inside = sigmoid_loss(a, p, n, backend=backend)
        grads = torch.autograd.grad(inside, (a, p, n))
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)
    for x, y in zip(grads, torch.autograd.grad(outside, (a, p, n)), strict=True):
        assert torch.equal(x, y)


def test_half_gradients_survive_loss_scaling(place):
    """What is kept for backward is float32 until the upstream factor is in it."""
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((5, 5), 16, torch.float16, device))
    small = {"tau": 1e-6, "bias": 0.0, "backend": backend}
    tiny = torch.autograd.grad(sigmoid_loss(a, p, **small) * 2.0**18, (a, p))
    wide = [x.detach().float().requires_grad_() for x in (a, p)]
    expected = torch.autograd.grad(sigmoid_loss(*wide, **small) * 2.0**18, wide)
    for x, y in zip(tiny, expected, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=1e-3, atol=1e-3 * y.abs().max().item())


def test_backward_twice_with_retain_graph(place):
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((4, 4), 6, torch.float32, device))
    loss = sigmoid_loss(a, p, backend=backend)
    loss.backward(retain_graph=True)
    once = a.grad.clone()
    loss.backward()
    assert torch.equal(a.grad, 2 * once) and once.ne(0).any()


def test_double_backward_is_refused(place):
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((4, 4), 6, torch.float64, device))
    with pytest.raises(RuntimeError, match="sigmoid_loss has no second derivative"):
        torch.autograd.grad(sigmoid_loss(a, p, backend=backend), a, create_graph=True)


def test_equal_calls_give_equal_bits_and_inputs_stay(place):
    device, backend = place
    inputs = rows((20, 20, 30), 24, torch.float32, device)
    given = options("mask-targets-groups", 20, 50, device)
    before = [x.clone() for x in inputs]
    first, second = (run(inputs, backend, **given) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("which", ["plain", "ids", "ids-targets-groups"])
def test_the_logits_are_never_held(which, place):
    device, backend = place
    inputs = [x.requires_grad_() for x in rows((60, 60, 40), 4, torch.float32, device)]
    given = options(which, 60, 100, device)
    with Recorder() as seen:
        sigmoid_loss(*inputs, backend=backend, **given).backward()
    if backend == "reference":
        assert seen.largest >= 4 * 60 * 100
    else:  # the buffer of 2,400 bytes, and (C, D) float32, D to a multiple of 16; the logits are 24,000 bytes
        assert 4 * 100 * 4 <= seen.largest <= 4.5 * 4 * 100 * 4


def test_no_gradient_work_where_none_is_needed(monkeypatch, place):
    device, backend = place
    if backend == "reference":
        pytest.skip("it makes what it needs of what is there")
    monkeypatch.setattr(scan, "BUFFER", 1 << 20)
    monkeypatch.setattr(chunks, "BUFFER", 1 << 20)
    leaves = [*rows((10, 10, 6), 4, torch.float32, device)]
    leaves += numbers(10.0, -10.0, leaves[0])

    def products(*needs) -> int:
        a, p, n, tau, bias = (x.detach().requires_grad_(need) for x, need in zip(leaves, needs, strict=True))
        with Recorder() as seen:
            sigmoid_loss(a, p, n, tau=tau, bias=bias, backend=backend)
        return seen.products()

    assert products(False, False, False, False, False) == products(False, False, False, False, True) == 1
    assert products(True, False, False, True, True) == products(False, False, True, False, True) == 2
    assert products(True, True, True, True, True) == 3
    # tau's derivative is of the rows' product, or of the pass between the products
    assert products(False, False, False, True, False) == (1 if backend == "triton" else 2)


@pytest.mark.parametrize("which", ["plain", "mask", "ids-targets-groups"])
def test_opcheck(which, place):
    device, backend = place
    inputs = [x.requires_grad_() for x in rows((4, 5, 3), 6, torch.float32, device)]
    if which == "plain":
        inputs[2] = None
    given = options(which, 4, 5 if which == "plain" else 8, device)
    ignore = given.get("ignore")
    fields = (
        *(x.requires_grad_() for x in numbers(3.0, -1.0, inputs[0])),
        given.get("targets"),
        ignore if isinstance(ignore, torch.Tensor) else None,
        *(ignore if isinstance(ignore, tuple) else (None, None)),
        *given.get("positive_ids", (None, None)),
    )
    needs = [x is not None for x in (*inputs, *fields[:2])]
    torch.library.opcheck(torch.ops.raoe_kernels.sigmoid.default, (*inputs, *fields, needs, backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch."))
def test_fullgraph_gives_the_same(dtype, place):
    device, backend = place

    def step(a, p, n, tau, bias, ids):
        return sigmoid_loss(
            a * 1.0, p, n, tau=tau.exp(), bias=bias, ignore=ids, backend=backend
        ) * 2 + sigmoid_loss(a, p, positive_ids=(ids[0], ids[0]), backend=backend)  # fmt: skip

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        inputs = rows((n, n, 4), 8, dtype, device, seed=n)
        inputs = [x.requires_grad_() for x in (*inputs, *numbers(1.0, -2.0, inputs[0]))]
        ids = torch.arange(n, device=device) % 4, torch.arange(n + 4, device=device) % 4
        eager, traced = step(*inputs, ids), compiled(*inputs, ids)
        torch.testing.assert_close(traced, eager)
        for x, y in zip(torch.autograd.grad(traced, inputs), torch.autograd.grad(eager, inputs), strict=True):
            torch.testing.assert_close(x, y)


A, P, N = torch.rand(3, 4), torch.rand(3, 4), torch.rand(2, 4)
T = torch.tensor([0, 1, 2])
WRONG = [
    (lambda: sigmoid_loss([[1.0]], P), TypeError, "anchors must be a tensor.*list"),
    (lambda: sigmoid_loss(A[0], P), ValueError, r"anchors must have 2 dimensions.*\(4,\)"),
    (lambda: sigmoid_loss(A, P[:, :2]), ValueError, r"positives must have anchors' columns.*\(3, 2\).*\(3, 4\)"),
    (lambda: sigmoid_loss(A, P, N.half()), ValueError, "negatives must have anchors'.*float16"),
    (lambda: sigmoid_loss(A, P[:2]), ValueError, r"positives must have a row for each of the 3 anchors.*\(2, 4\)"),
    (lambda: sigmoid_loss(A, P, tau=0), ValueError, "tau must be a finite number > 0, got 0"),
    (lambda: sigmoid_loss(A, P, tau=torch.tensor(-1.0)), ValueError, "tau must be a finite number > 0, got -1.0"),
    (lambda: sigmoid_loss(A, P, tau=torch.ones(1)), ValueError, r"tau must be .* \(\) float tensor on cpu.*\(1,\)"),
    (lambda: sigmoid_loss(A, P, bias=torch.tensor(1)), ValueError, r"bias must be a number or .* float tensor.*int64"),
    (lambda: sigmoid_loss(A, P, bias=math.inf), ValueError, "bias must be a finite number, got inf"),
    (lambda: sigmoid_loss(A, P, bias="-10"), TypeError, "bias must be a number, got '-10'"),
    (lambda: sigmoid_loss(A, P, targets=T.float()), TypeError, "targets must be integers.*float32"),
    (lambda: sigmoid_loss(A, P, targets=T[:2]), ValueError, r"targets must have shape \(3,\).*\(2,\)"),
    (lambda: sigmoid_loss(A, P, targets=T + 1), ValueError, r"targets must be columns -1 … 2 .*got 1 … 3"),
    (lambda: sigmoid_loss(A, P, ignore=T), TypeError, "ignore must be bool, or a pair.*int64"),
    (lambda: sigmoid_loss(A, P, N, ignore=(T, T)), ValueError, r"ignore\[1\] .* must have shape \(5,\)"),
    (lambda: sigmoid_loss(A, P, positive_ids=T), TypeError, "positive_ids must be a pair of integer tensors.*int64"),
    (lambda: sigmoid_loss(A, P, N, positive_ids=(T, T)), ValueError, r"positive_ids\[1\] .* have shape \(5,\)"),
    (lambda: sigmoid_loss(A, P, backend="native"), RuntimeError, "sigmoid has no native backend"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong(number):
    call, kind, message = WRONG[number]
    with pytest.raises(kind, match=message):
        call()


def test_auto_on_the_cpu_is_scan():
    assert torch.equal(sigmoid_loss(A, P, N), sigmoid_loss(A, P, N, backend="scan"))
