"""info_nce_loss: every backend x dtype against the float64 reference, tiny cases by hand, its options and edges."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import raoe_kernels
from raoe_kernels import info_nce_loss
from raoe_kernels.infonce import chunks, scan
from raoe_kernels.infonce.problem import Problem
from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.conftest import HAS_GPU, PLACES

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HERE = [place for place in PLACES if place[1] != "native"]  # there is no native InfoNCE
LOG3 = math.log(3)


@pytest.fixture(params=HERE, ids=[f"{d}-{b}" for d, b in HERE])
def place(request):
    device, backend = request.param
    reason = raoe_kernels.backends(device)["info_nce_loss"][backend]
    if reason is not True:
        pytest.skip(f"{backend} on {device}: {reason}")
    return request.param


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Buffers of a few rows, so that small batches have whole chunks and a ragged one; and, where nothing is compiled
    for it, blocks of a few columns."""
    monkeypatch.setattr(scan, "BUFFER", 2400)
    monkeypatch.setattr(chunks, "BUFFER", 2400)
    monkeypatch.setattr(chunks, "ROWS", 1)
    if not HAS_GPU and find_spec("triton"):
        from raoe_kernels.infonce import triton_kernels

        for table, block in (("WEIGHTS", 32), ("SHORT", 32), ("ROWS", 64)):
            monkeypatch.setitem(getattr(triton_kernels, table), "BLOCK", block)


def rows(sizes, columns, dtype, device="cpu", seed=0):
    """Matrices of some numbers of rows, of norms from a tenth to ten; None for a size of None."""
    seeded = torch.Generator().manual_seed(seed)

    def one(size):
        x = torch.randn(size, columns, generator=seeded, dtype=torch.float64)
        return x * 10 ** (torch.rand(size, 1, generator=seeded, dtype=torch.float64) * 2 - 1) / columns**0.5

    return [None if size is None else one(size).to(dtype).to(device) for size in sizes]


def run(inputs, backend, upstream=-1.5, **options):
    """The loss, and the gradients of the inputs there are, under an upstream gradient that is not 1."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    loss = info_nce_loss(*leaves, backend=backend, **options)
    return loss.detach(), *torch.autograd.grad(loss * upstream, [x for x in leaves if x is not None])


def options(which, n, columns, device="cpu"):
    """Optional arguments by name; some anchors share a positive, and ids and mask hit positives too."""
    seeded = torch.Generator().manual_seed(1)
    targets = torch.randint(columns, (n,), generator=seeded)
    targets[: n // 2] = targets[0]
    mask = torch.rand(n, columns, generator=seeded) < 0.3
    mask[torch.arange(n), targets] = True
    ids = torch.randint(4, (n,), generator=seeded), torch.randint(4, (columns,), generator=seeded)
    table = {
        "plain": {},
        "symmetric": {"symmetric": True},
        "targets": {"targets": targets, "tau": 5.0},
        "mask": {"ignore": mask},
        "ids": {"ignore": ids},
        "mask-targets-symmetric": {"ignore": mask, "targets": targets, "symmetric": True},
        "ids-targets-symmetric": {"ignore": ids, "targets": targets, "symmetric": True, "tau": 60.0},
    }

    def move(value):
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in table[which].items()}


# (anchors, positives, negatives), columns: one row, no negatives, ragged tiles and chunks, aligned and odd widths.
SHAPES = [
    ((1, 1, None), 3, "plain"),
    ((5, 5, None), 7, "plain"),
    ((3, 4, 130), 48, "symmetric"),
    ((2, 3, None), 384, "plain"),
    ((34, 34, 7), 17, "plain"),
    ((35, 38, None), 16, "symmetric"),
    ((5, 5, 3), 129, "mask"),
    ((36, 3, 60), 16, "targets"),
    ((36, 40, 3), 20, "mask-targets-symmetric"),
    ((17, 17, 70), 80, "ids"),
    ((20, 2, 30), 48, "ids-targets-symmetric"),
    pytest.param((9, 9, 5), 385, "mask", marks=pytest.mark.slow),
    pytest.param((66, 70, 80), 160, "ids-targets-symmetric", marks=pytest.mark.slow),
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
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    spread = 2 * given.get("tau", 20.0)
    assert_loss_accurate(ours[0], plain[0], truth[0], spread)
    for x, p, t in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert x.dtype == dtype
        assert_gradient_accurate(x, p, t, spread)


# Unit axes at an angle of 90 degrees, of other norms than 1, and tau = log 3: a softmax of two is 3/4 and 1/4.
ANCHORS, POSITIVES, NEGATIVES = [[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]], [[0.0, -5.0]]


def by_hand(device, *matrices):
    return [torch.tensor(x, dtype=torch.float64, device=device) for x in matrices]


@pytest.mark.parametrize(
    "negatives, given, expected",
    [
        (False, {}, math.log(4 / 3)),
        (False, {"symmetric": True}, math.log(4 / 3)),
        (False, {"targets": [1, 0]}, math.log(4)),
        (False, {"targets": [0, 0]}, (math.log(4 / 3) + math.log(4)) / 2),
        # the column 0 looks for both: from anchor 0 (3 of 4), and from anchor 1 (1 of 4)
        (False, {"targets": [0, 0], "symmetric": True}, (math.log(4 / 3) + math.log(4)) / 2),
        # logits 1, 0, 0 and 0, 1, -1: of 3 + 1 + 1 and of 1 + 3 + 1/3
        (True, {}, (math.log(5 / 3) + math.log(13 / 9)) / 2),
        (True, {"symmetric": True}, (math.log(5 / 3) + math.log(13 / 9)) / 4 + math.log(4 / 3) / 2),
        (True, {"targets": [2, 2]}, (math.log(5) + math.log(13)) / 2),
        (True, {"ignore": [[0, 0, 1], [0, 0, 0]]}, (math.log(4 / 3) + math.log(13 / 9)) / 2),
        (True, {"ignore": [[1, 1, 1], [1, 1, 1]]}, 0.0),  # nothing is left but the positive
        (True, {"ignore": ([7, 8], [7, 7, 8])}, (math.log(5 / 3) - math.log(5 / 4) + math.log(4 / 3)) / 2),
        # backwards, column 0 ignores anchor 1 (0 lost) and column 1 looks for anchor 1 among both
        (True, {"ignore": [[0, 0, 1], [1, 0, 1]], "symmetric": True}, (math.log(4 / 3) + 0 + 0 + math.log(4 / 3)) / 4),
        # both anchors have column 0: its ids leave the other anchor out of the way back
        (False, {"ignore": ([5, 5], [5, 6]), "targets": [0, 0], "symmetric": True},
         (math.log(4 / 3) + math.log(4)) / 4),
    ],
)  # fmt: skip
def test_by_hand(negatives, given, expected, place):
    device, backend = place
    given = dict(given)
    if "targets" in given:
        given["targets"] = torch.tensor(given["targets"], device=device)
    if isinstance(given.get("ignore"), list):
        given["ignore"] = torch.tensor(given["ignore"], device=device).bool()
    elif "ignore" in given:
        given["ignore"] = tuple(torch.tensor(ids, device=device) for ids in given["ignore"])
    inputs = by_hand(device, ANCHORS, POSITIVES, *([NEGATIVES] if negatives else []))
    loss = info_nce_loss(*inputs, tau=LOG3, backend=backend, **given)
    assert loss.item() == pytest.approx(expected, abs=1e-14)


def test_gradient_by_hand(place):
    device, backend = place
    inputs = [x.requires_grad_() for x in by_hand(device, ANCHORS, POSITIVES)]
    loss = info_nce_loss(*inputs, tau=LOG3, backend=backend)
    by_anchors, by_positives = torch.autograd.grad(loss, inputs)
    # dloss/dlogit = (softmax - own) / 2 = -+1/8; anchor 0 is pulled to column 0 and pushed from column 1, tau times;
    # what points along the row itself is projected away, and the rest divided by the row's norm
    assert by_anchors.flatten().tolist() == pytest.approx([0, LOG3 / 8, LOG3 / 8 / 2, 0], abs=1e-15)
    assert by_positives.flatten().tolist() == pytest.approx([0, LOG3 / 8 / 3, LOG3 / 8, 0], abs=1e-15)


def test_is_cross_entropy_of_cosines(place):
    device, backend = place
    a, p, n = rows((6, 8, 5), 20, torch.float64, device)
    columns = F.normalize(torch.cat((p, n)))
    expected = F.cross_entropy(20 * F.normalize(a) @ columns.T, torch.arange(6, device=device))
    torch.testing.assert_close(info_nce_loss(a, p, n, backend=backend), expected, rtol=1e-13, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_is_sentence_transformers_loss(symmetric, place):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    device, backend = place
    way = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"} if symmetric else {}
    theirs = losses.MultipleNegativesRankingLoss(None, scale=15.0, **way)
    embeddings = [x.requires_grad_() for x in rows((6, 6, 6, 6), 24, torch.float64, device)]
    expected = theirs.compute_loss_from_embeddings(embeddings, None)
    anchors, positives, *negatives = embeddings
    loss = info_nce_loss(anchors, positives, torch.cat(negatives), tau=15.0, symmetric=symmetric, backend=backend)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for x, y in zip(torch.autograd.grad(loss, embeddings), torch.autograd.grad(expected, embeddings), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_two_halves_of_a_gathered_batch_are_the_whole(place):
    device, backend = place
    a, p = rows((8, 8), 12, torch.float64, device)
    whole = run((a, p), backend)
    halves = [run((a[i : i + 4], p), backend, targets=torch.arange(i, i + 4, device=device)) for i in (0, 4)]
    torch.testing.assert_close((halves[0][0] + halves[1][0]) / 2, whole[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.cat([h[1] for h in halves]) / 2, whole[1], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close((halves[0][2] + halves[1][2]) / 2, whole[2], rtol=1e-11, atol=1e-14)


def test_equal_ids_are_their_mask(place):
    device, backend = place
    inputs = rows((9, 9, 6), 10, torch.float64, device)
    ids = torch.arange(9, device=device) % 4, torch.arange(15, device=device) % 4
    for symmetric in (False, True):
        by_ids = run(inputs, backend, ignore=ids, symmetric=symmetric)
        by_mask = run(inputs, backend, ignore=ids[0][:, None] == ids[1], symmetric=symmetric)
        none = run(inputs, backend, symmetric=symmetric)
        assert by_ids[0] < none[0]
        for x, y in zip(by_ids, by_mask, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-15)


def test_gradcheck(place):
    device, backend = place
    inputs = [x.requires_grad_() for x in rows((3, 4, 2), 5, torch.float64, device)]
    given = options("mask-targets-symmetric", 3, 6, device)
    assert torch.autograd.gradcheck(
        lambda *x: info_nce_loss(*x, tau=3.0, backend=backend, **given), inputs, fast_mode=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_zero_rows_have_similarity_and_gradient_zero(dtype, place, poisoned):
    device, backend = place
    inputs = rows((6, 6, 4), 40, dtype, device)
    for x in inputs:
        x[1] = 0
        x[3] = 0 if dtype == torch.float16 else 1e-10
    loss, *grads = run(inputs, backend, symmetric=True)
    assert loss.isfinite()
    for grad in grads:
        assert grad[[1, 3]].eq(0).all() and grad[[0, 2]].ne(0).any(1).all()
    # two zero rows: log of how many columns there are
    alone = info_nce_loss(inputs[0][1:2], inputs[1][1:2], inputs[2], backend=backend)
    assert alone.item() == pytest.approx(math.log(5), rel=1e-6)


def test_a_row_just_above_the_bound_counts(place):
    device, backend = place
    a = torch.tensor([[1.1e-8, 0.0]], device=device)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    assert info_nce_loss(a, k, tau=LOG3, backend=backend).item() == pytest.approx(math.log(4 / 3), rel=1e-5)
    assert info_nce_loss(a * 0.9, k, tau=LOG3, backend=backend).item() == pytest.approx(math.log(2), rel=1e-5)


def test_a_small_loss_keeps_its_digits(place):
    device, backend = place
    if backend == "reference":
        pytest.skip("the specification subtracts: its float32 loss is 0 here, and its float64 loss right")
    a = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], device=device)
    loss, by_anchors, _ = run((a, a + torch.tensor([[0.0, 1e-4], [0.0, -1e-4]], device=device)), backend, upstream=1.0)
    assert loss.item() == pytest.approx(math.exp(-40), rel=1e-4, abs=0)
    assert by_anchors.abs().max().item() == pytest.approx(20 * math.exp(-40) * 1e-4, rel=1e-3, abs=0)


@pytest.mark.parametrize("tau", [1e-3, 39.0, 85.0, 1000.0])  # exp(85) is a float32, a hundred times that is none
def test_any_tau(tau, place):
    device, backend = place
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    many = 1 if backend == "triton" else 100  # its interpreter is slow
    # the positive is opposite, the negatives are the anchor: 2 tau + log many, and almost nothing more
    loss, *grads = run((a, -a, a.repeat(many, 1)), backend, tau=tau)
    # logits: -tau the positive, tau the negatives of its own, zeros
    expected = 2 * tau + math.log(many) + math.log1p(math.exp(-2 * tau) / many + (1 + 1 / many) * math.exp(-tau))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("needs", [(a, p, n) for a in (0, 1) for p in (0, 1) for n in (0, 1)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_partial_gradients(needs, symmetric, place, poisoned):
    device, backend = place
    inputs = rows((4, 5, 3), 9, torch.float64, device)
    given = {"symmetric": symmetric, "targets": torch.tensor([7, 1, 1, 0], device=device)}
    expected = run(inputs, backend, upstream=1.0, **given)
    for x, need in zip(inputs, needs, strict=True):
        x.requires_grad_(bool(need))
    loss = info_nce_loss(*inputs, backend=backend, **given)
    assert loss.requires_grad == any(needs) and torch.equal(loss.detach(), expected[0])
    if any(needs):
        loss.backward()
    for x, need, grad in zip(inputs, needs, expected[1:], strict=True):
        if need:
            torch.testing.assert_close(x.grad, grad, rtol=1e-13, atol=1e-16)
        else:
            assert x.grad is None


@pytest.mark.parametrize("start, width", [(5, 33), (16, 32)])
def test_strides_and_views_do_not_matter(start, width, place, poisoned):
    device, backend = place
    here = slice(start, start + width)
    inputs = rows((7, 7, 5), width, torch.float64, device)
    given = options("mask-targets-symmetric", 7, 12, device)
    expected = run(inputs, backend, **given)
    wide = torch.full((7, 80), 9.0, dtype=torch.float64, device=device)
    wide[:, here] = inputs[0]
    leaves = [wide.requires_grad_(), inputs[1].t().contiguous().requires_grad_(), inputs[2].repeat(2, 1)]
    leaves[2] = leaves[2].requires_grad_()
    loss = info_nce_loss(
        leaves[0][:, here],
        leaves[1].t(),
        leaves[2][:5],
        backend=backend,
        targets=given["targets"].repeat_interleave(2)[::2],
        ignore=given["ignore"].t().contiguous().t(),
        symmetric=True,
    )
    grads = torch.autograd.grad(loss * -1.5, leaves)
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-13, atol=0)
    for x, y in zip((grads[0][:, here], grads[1].t(), grads[2][:5]), expected[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-14)
    grads[0][:, here] = 0
    assert grads[0].eq(0).all() and grads[2][5:].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("sizes", [(0, 0, None), (0, 3, 2), (0, 0, 0)])
def test_no_anchors(sizes, dtype, place):
    device, backend = place
    inputs = rows(sizes, 4, dtype, device)
    loss, *grads = run(inputs, backend, symmetric=True)
    assert loss.item() == 0 and loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for x, grad in zip([x for x in inputs if x is not None], grads, strict=True):
        assert grad.shape == x.shape and grad.dtype == dtype and grad.eq(0).all()


def test_no_negatives_and_no_columns(place):
    device, backend = place
    a, p, n = rows((3, 3, 0), 4, torch.float64, device)
    loss, *grads = run((a, p, n), backend)
    alone = run((a, p), backend)
    assert torch.equal(loss, alone[0]) and torch.equal(grads[0], alone[1]) and grads[2].shape == (0, 4)
    flat = [x[:, :0] for x in (a, p)]
    loss, *grads = run(flat, backend)
    assert loss.item() == pytest.approx(LOG3) and [g.shape for g in grads] == [(3, 0), (3, 0)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_bad_row_spoils_everything(which, bad, place):
    device, backend = place
    inputs = rows((4, 4, 3), 8, torch.float32, device)
    inputs[which][2, 3] = bad
    # ignored by everybody where it may be: a row that is there is used
    ignore = torch.zeros(4, 7, dtype=torch.bool, device=device)
    ignore[:, 2 if which == 1 else 6] = True
    loss, *grads = run(inputs, backend, ignore=ignore)
    assert loss.isnan() and all(grad.isnan().all() for grad in grads)


def test_targets_out_of_range(place):
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((3, 3), 8, torch.float32, device))
    for wrong in (3, -1):
        targets = torch.tensor([0, 1, wrong], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=r"targets must be columns 0 … 2 .* got"):
                info_nce_loss(a, p, targets=targets, backend=backend)
        call = torch.compile(info_nce_loss, fullgraph=True, backend="aot_eager") if device == "cpu" else info_nce_loss
        assert call(a, p, targets=targets, backend=backend).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype, place):
    device, backend = place
    a, p, n = (x.requires_grad_() for x in rows((5, 5, 4), 16, torch.float32, device))
    outside = info_nce_loss(a, p, n, symmetric=True, backend=backend)
    with torch.autocast(device, dtype=dtype):
        inside = info_nce_loss(a, p, n, symmetric=True, backend=backend)
        grads = torch.autograd.grad(inside, (a, p, n))
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)
    for x, y in zip(grads, torch.autograd.grad(outside, (a, p, n)), strict=True):
        assert torch.equal(x, y)


def test_half_gradients_survive_loss_scaling(place):
    """What is kept for backward is float32 until the upstream factor is in it."""
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((5, 5), 16, torch.float16, device))
    tiny = torch.autograd.grad(info_nce_loss(a, p, tau=1e-6, backend=backend) * 2.0**20, (a, p))
    wide = [x.detach().float().requires_grad_() for x in (a, p)]
    expected = torch.autograd.grad(info_nce_loss(*wide, tau=1e-6, backend=backend) * 2.0**20, wide)
    for x, y in zip(tiny, expected, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=1e-3, atol=1e-3 * y.abs().max().item())


def test_backward_twice_with_retain_graph(place):
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((4, 4), 6, torch.float32, device))
    loss = info_nce_loss(a, p, backend=backend)
    loss.backward(retain_graph=True)
    once = a.grad.clone()
    loss.backward()
    assert torch.equal(a.grad, 2 * once) and once.ne(0).any()


def test_double_backward_is_refused(place):
    device, backend = place
    a, p = (x.requires_grad_() for x in rows((4, 4), 6, torch.float64, device))
    with pytest.raises(RuntimeError, match="info_nce_loss has no second derivative"):
        torch.autograd.grad(info_nce_loss(a, p, backend=backend), a, create_graph=True)


def test_equal_calls_give_equal_bits_and_inputs_stay(place):
    device, backend = place
    inputs = rows((20, 20, 30), 24, torch.float32, device)
    given = options("mask-targets-symmetric", 20, 50, device)
    before = [x.clone() for x in inputs]
    first, second = (run(inputs, backend, **given) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


class Recorder(TorchDispatchMode):
    """Operators that run, and the largest result of any of them that is not a view."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append(str(function.overloadpacket))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result

    def products(self) -> int:
        return sum(call in ("aten.mm", "aten.addmm", "aten.addmm_") for call in self.calls)


@pytest.mark.parametrize("which", ["plain", "ids", "ids-targets-symmetric"])
def test_the_logits_are_never_held(which, place):
    device, backend = place
    inputs = [x.requires_grad_() for x in rows((60, 60, 40), 4, torch.float32, device)]
    given = options(which, 60, 100, device)
    with Recorder() as seen:
        info_nce_loss(*inputs, backend=backend, **given).backward()
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
    inputs = rows((10, 10, 6), 4, torch.float32, device)

    def products(*needs, **given) -> int:
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        with Recorder() as seen:
            info_nce_loss(*leaves, backend=backend, **given)
        return seen.products()

    assert products(False, False, False) == 1
    assert products(True, False, False) == products(False, False, True) == 2
    assert products(True, True, True) == 3
    # the other direction's sums first; then all of the gradient from one matrix of weights
    assert products(True, True, True, symmetric=True) == (4 if backend == "triton" else 6)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.no_grad(), Recorder() as seen:
        assert not info_nce_loss(*leaves, backend=backend).requires_grad
    assert seen.products() == 1


@pytest.mark.parametrize("which", ["plain", "mask", "ids-targets-symmetric"])
def test_opcheck(which, place):
    device, backend = place
    inputs = [x.requires_grad_() for x in rows((4, 5, 3), 6, torch.float32, device)]
    if which == "plain":
        inputs[2] = None
    given = options(which, 4, 5 if which == "plain" else 8, device)
    ignore = given.get("ignore")
    ids = ignore if isinstance(ignore, tuple) else (None, None)
    symmetric = given.get("symmetric", False)
    problem = Problem(
        *inputs, targets=given.get("targets"), ignored=ignore if isinstance(ignore, torch.Tensor) else None,
        anchor_ids=ids[0], column_ids=ids[1], tau=given.get("tau", 20.0), joint=not symmetric,
        directions=("query_to_doc", "doc_to_query")[: 1 + symmetric],
    )  # fmt: skip
    needs = [x is not None for x in problem[:5]]
    torch.library.opcheck(torch.ops.raoe_kernels.infonce.default, (*problem, needs, backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch."))
def test_fullgraph_gives_the_same(dtype, place):
    device, backend = place

    def step(a, p, n, ids):
        return info_nce_loss(a * 1.0, p, n, ignore=ids, symmetric=True, backend=backend) * 2 + info_nce_loss(
            a, p, backend=backend
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        inputs = [x.requires_grad_() for x in rows((n, n, 4), 8, dtype, device, seed=n)]
        ids = torch.arange(n, device=device) % 4, torch.arange(n + 4, device=device) % 4
        eager, traced = step(*inputs, ids), compiled(*inputs, ids)
        torch.testing.assert_close(traced, eager)
        for x, y in zip(torch.autograd.grad(traced, inputs), torch.autograd.grad(eager, inputs), strict=True):
            torch.testing.assert_close(x, y)


A, P, N = torch.rand(3, 4), torch.rand(3, 4), torch.rand(2, 4)
T = torch.tensor([0, 1, 2])
WRONG = [
    (lambda: info_nce_loss([[1.0]], P), TypeError, "anchors must be a tensor.*list"),
    (lambda: info_nce_loss(A[0], P), ValueError, r"anchors must have 2 dimensions.*\(4,\)"),
    (lambda: info_nce_loss(A.long(), P), TypeError, "anchors must be float16.*int64"),
    (lambda: info_nce_loss(A, P[:, :2]), ValueError, r"positives must have anchors' columns.*\(3, 2\).*\(3, 4\)"),
    (lambda: info_nce_loss(A, P.double()), ValueError, "positives must have anchors' columns, dtype.*float64"),
    (lambda: info_nce_loss(A, P.to("meta")), ValueError, "positives must have anchors' .* device.*meta"),
    (lambda: info_nce_loss(A, P, N.half()), ValueError, "negatives must have anchors'.*float16"),
    (lambda: info_nce_loss(A, P, 3), TypeError, "negatives must be a tensor, got 3"),
    (lambda: info_nce_loss(A, P[:2]), ValueError, r"positives must have a row for each of the 3 anchors.*\(2, 4\)"),
    (lambda: info_nce_loss(A, P, tau=0), ValueError, "tau must be a finite number > 0, got 0"),
    (lambda: info_nce_loss(A, P, symmetric=1), TypeError, "symmetric must be True or False, got 1"),
    (lambda: info_nce_loss(A, P, targets=[0, 1, 2]), TypeError, "targets must be a tensor of integers.*list"),
    (lambda: info_nce_loss(A, P, targets=T.float()), TypeError, "targets must be integers.*float32"),
    (lambda: info_nce_loss(A, P, targets=T.bool()), TypeError, "targets must be integers.*bool"),
    (lambda: info_nce_loss(A, P, targets=T[:2]), ValueError, r"targets must have shape \(3,\).*\(2,\)"),
    (lambda: info_nce_loss(A, P, targets=T + 1), ValueError, r"targets must be columns 0 … 2 .*got 1 … 3"),
    (lambda: info_nce_loss(A, P[:0], targets=T), ValueError, "targets must be columns .* none"),
    (lambda: info_nce_loss(A, P, ignore=T), TypeError, "ignore must be bool, or a pair.*int64"),
    (lambda: info_nce_loss(A, P, N, ignore=torch.ones(3, 3) > 0), ValueError, r"ignore must have shape \(3, 5\)"),
    (lambda: info_nce_loss(A, P, ignore=(T,)), TypeError, "ignore must be a bool tensor or a pair"),
    (lambda: info_nce_loss(A, P, ignore=(T, T.float())), TypeError, r"ignore\[1\] \(column_ids\) must be integers"),
    (lambda: info_nce_loss(A, P, N, ignore=(T, T)), ValueError, r"ignore\[1\] .* must have shape \(5,\)"),
    (lambda: info_nce_loss(A, P, backend="cuda"), ValueError, "backend must be one of"),
    (lambda: info_nce_loss(A, P, backend="native"), RuntimeError, "infonce has no native backend"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong(number):
    call, kind, message = WRONG[number]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_integers_are_targets_and_ids(dtype):
    ids = T % 2
    wide = info_nce_loss(A, P, targets=T.flip(0), ignore=(ids, ids))
    assert torch.equal(info_nce_loss(A, P, targets=T.flip(0).to(dtype), ignore=[ids.to(dtype), ids.to(dtype)]), wide)


def test_auto_on_the_cpu_is_scan():
    assert torch.equal(info_nce_loss(A, P, N), info_nce_loss(A, P, N, backend="scan"))
