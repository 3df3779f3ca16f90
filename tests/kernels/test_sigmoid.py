"""sigmoid_loss: every backend x dtype against the float64 reference, tiny cases by hand, scale and bias, each gradient
alone. What it has in common with InfoNCE: test_contrast.py."""

import math

import pytest
import torch

from raoe_kernels import sigmoid_loss
from raoe_kernels.testing import GRADIENT_FACTOR, ULPS, assert_accurate, assert_gradient_accurate
from tests.kernels.conftest import available
from tests.kernels.contrast_cases import HERE, IDS, JUDGED, SIGMOID, rows

pytestmark = pytest.mark.usefixtures("small_buffers")
run = SIGMOID.run
LOG2, LOG3 = math.log(2), math.log(3)


@pytest.fixture(params=HERE, ids=IDS)
def place(request):
    return available(request.param, "sigmoid_loss")


@JUDGED
@pytest.mark.parametrize("sizes, width, which, dtype", SIGMOID.shapes())
def test_against_the_reference(sizes, width, which, dtype, place, poisoned):
    ours, plain, truth, spread = SIGMOID.three(sizes, width, which, dtype, *place)
    wide = ours[0].dtype
    for x, p, t in zip(ours[1:-2], plain[1:], truth[1:], strict=False):
        assert x.dtype == dtype
        assert_gradient_accurate(x, p, t, spread)
    # Sums of what has both signs are rounded at the size of their terms; a pair's derivative is at most its loss.
    floor = ULPS * torch.finfo(wide).eps * (1 + spread) * 1.5 * truth[0].item()
    for x, p, t in zip(ours[-2:], plain[-2:], truth[-2:], strict=True):
        assert x.dtype == wide
        assert_accurate("gradient", x, p, t, factor=GRADIENT_FACTOR, floor=floor)


# Unit axes at an angle of 90 degrees, of other norms than 1, and scale = log 3. Without a bias the sigmoid of a cosine
# of 1, 0 and -1 is 3/4, 1/2 and 1/4; with a bias of log 3 it is 9/10, 3/4 and 1/2.
ANCHORS, POSITIVES, NEGATIVES = [[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]], [[0.0, -5.0]]


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
    chosen = (ANCHORS, POSITIVES, NEGATIVES)[: 2 + negatives]
    inputs = [torch.tensor(x, dtype=torch.float64, device=device) for x in chosen]
    loss = sigmoid_loss(*inputs, scale=LOG3, bias=bias, backend=backend, **given)
    assert loss.item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_learned_may_have_a_dtype_of_its_own(dtype, place):
    device, backend = place
    a, p = rows((5, 5), 7, dtype, device)
    scale, bias = torch.tensor(3.0, device=device, requires_grad=True), torch.zeros((), device=device).double()
    loss = sigmoid_loss(a, p, scale=scale, bias=bias.requires_grad_(), backend=backend)
    by_scale, by_bias = torch.autograd.grad(loss, (scale, bias))
    assert by_scale.dtype == torch.float32 and by_bias.dtype == torch.float64
    truth = run([a.double(), p.double()], "reference", 1.0, scale=3.0, bias=0.0)
    assert by_scale.item() == pytest.approx(truth[3].item(), rel=1e-4)
    assert by_bias.item() == pytest.approx(truth[4].item(), rel=1e-4)


def test_a_small_loss_keeps_its_digits(place):
    device, backend = place
    a = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], device=device)
    loss, _, _, by_scale, by_bias = run((a, a), backend, upstream=1.0, scale=40.0, bias=5.0)
    # logits 45 at the positive and -35 at the other
    assert loss.item() == pytest.approx(math.exp(-45) + math.exp(-35), rel=1e-5, abs=0)
    assert by_bias.item() == pytest.approx(math.exp(-35) - math.exp(-45), rel=1e-5, abs=0)
    assert by_scale.item() == pytest.approx(-math.exp(-35) - math.exp(-45), rel=1e-5, abs=0)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 100.0, 1000.0])
def test_any_scale(scale, place):
    device, backend = place
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    # the positive is opposite, and the negative the anchor itself: scale each; and two that are at right angles
    loss, *grads = run((a, -a, a), backend, scale=scale, bias=0.0)
    assert loss.item() == pytest.approx(2 * scale + 2 * math.log1p(math.exp(-scale)) + 2 * LOG2, rel=1e-6)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[3].item() == pytest.approx(-1.5 * 2 / (1 + math.exp(-scale)), rel=1e-5)
