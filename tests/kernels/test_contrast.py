"""What info_nce_loss and sigmoid_loss have in common: ids, edges, dtypes, autocast and memory."""

import math

import pytest
import torch

from tests.kernels.conftest import available
from tests.kernels.contrast_cases import HERE, IDS, INFONCE, SIGMOID, Recorder, rows
from tests.kernels.pairwise_cases import EVERY_DTYPE

pytestmark = pytest.mark.usefixtures("small_buffers")


@pytest.fixture(params=[INFONCE, SIGMOID], ids=str)
def contrast(request):
    return request.param


@pytest.fixture(params=HERE, ids=IDS)
def place(request, contrast):
    return available(request.param, contrast.loss.__name__)


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


@EVERY_DTYPE
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


@EVERY_DTYPE
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
            with pytest.raises(ValueError, match=rf"targets must be column indices {contrast.lowest} … 2 .* got"):
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


def test_auto_on_the_cpu_is_scan(contrast):
    leaves = contrast.leaves(rows((3, 3, 2), 4, torch.float32))
    assert torch.equal(contrast(leaves), contrast(leaves, backend="scan"))
