"""info_nce_loss: every backend x dtype against the float64 reference, tiny cases by hand, any scale, each gradient
alone. What it has in common with the sigmoid loss: test_contrast.py; its other forms: test_infonce_forms.py."""

import math
from dataclasses import replace

import pytest
import torch

from raoe_kernels import info_nce_loss
from raoe_kernels.testing import assert_gradient_accurate
from tests.kernels.conftest import available
from tests.kernels.contrast_cases import HERE, IDS, INFONCE, JUDGED

pytestmark = pytest.mark.usefixtures("small_buffers")
run = INFONCE.run
LOG3 = math.log(3)


@pytest.fixture(params=HERE, ids=IDS)
def place(request):
    return available(request.param, "info_nce_loss")


@JUDGED
@pytest.mark.parametrize("sizes, width, which, dtype", INFONCE.shapes())
def test_against_the_reference(sizes, width, which, dtype, place, poisoned):
    against_the_reference(INFONCE, sizes, width, which, dtype, *place)


@JUDGED
@pytest.mark.parametrize("sizes, width, which, dtype", INFONCE.shapes(1, 5, 6, 8, 10))
def test_a_learned_scale_against_the_reference(sizes, width, which, dtype, place, poisoned):
    against_the_reference(replace(INFONCE, learned={"scale": 20.0}), sizes, width, which, dtype, *place)


def against_the_reference(contrast, *asked):
    ours, plain, truth, spread = contrast.three(*asked)
    for x, p, t in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert x.dtype == p.dtype
        assert_gradient_accurate(x, p, t, spread)


def test_a_row_just_above_the_bound_counts(place):
    device, backend = place
    a = torch.tensor([[1.1e-8, 0.0]], device=device)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    assert info_nce_loss(a, k, scale=LOG3, backend=backend).item() == pytest.approx(math.log(4 / 3), rel=1e-5)
    assert info_nce_loss(a * 0.9, k, scale=LOG3, backend=backend).item() == pytest.approx(math.log(2), rel=1e-5)


def test_a_small_loss_keeps_its_digits(place):
    device, backend = place
    a = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], device=device)
    loss, by_anchors, _ = run((a, a + torch.tensor([[0.0, 1e-4], [0.0, -1e-4]], device=device)), backend, upstream=1.0)
    assert loss.item() == pytest.approx(math.exp(-40), rel=1e-4, abs=0)
    assert by_anchors.abs().max().item() == pytest.approx(20 * math.exp(-40) * 1e-4, rel=1e-3, abs=0)


@pytest.mark.parametrize("scale", [1e-3, 39.0, 85.0, 1000.0])  # exp(85) is a float32, a hundred times that is none
def test_any_scale(scale, place):
    device, backend = place
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    many = 1 if backend == "triton" else 100  # its interpreter is slow
    # the positive is opposite, the negatives are the anchor: 2 scale + log many, and almost nothing more
    loss, *grads = run((a, -a, a.repeat(many, 1)), backend, scale=scale)
    # logits: -scale the positive, scale the negatives of its own, zeros
    expected = 2 * scale + math.log(many) + math.log1p(math.exp(-2 * scale) / many + (1 + 1 / many) * math.exp(-scale))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert all(grad.isfinite().all() for grad in grads)


A, P, N = torch.rand(3, 4), torch.rand(3, 4), torch.rand(2, 4)
T = torch.tensor([0, 1, 2])
WRONG = [
    ((A.long(), P), {}, TypeError, "anchors"),
    ((A, P[:, :2]), {}, ValueError, "positives"),
    ((A, P.to("meta")), {}, ValueError, "positives"),
    ((A, P[:2]), {}, ValueError, "positives must have at least one row for each of the 3 anchors"),
    ((A, P, N.half()), {}, ValueError, "negatives"),
    ((A, P, 3), {}, TypeError, "negatives"),
    ((A, P), {"scale": 0}, ValueError, "scale"),
    ((A, P), {"symmetric": 1}, TypeError, "symmetric"),
    ((A, P), {"targets": T.float()}, TypeError, "targets"),
    ((A, P), {"targets": T.bool()}, TypeError, "targets"),
    ((A, P), {"targets": T[:2]}, ValueError, "targets"),
    ((A, P), {"targets": T + 1}, ValueError, "targets"),
    ((A, P[:0]), {"targets": T}, ValueError, "targets"),
    ((A, P), {"ignore": T}, TypeError, "ignore"),
    ((A, P, N), {"ignore": torch.ones(3, 3) > 0}, ValueError, "ignore"),
    ((A, P), {"ignore": (T,)}, TypeError, "ignore"),
    ((A, P, N), {"ignore": (T, T)}, ValueError, r"ignore\[1\]"),
    ((A, P), {"backend": "native"}, RuntimeError, "infonce has no native backend"),
]


@pytest.mark.parametrize("inputs, options, kind, key", WRONG)
def test_wrong(inputs, options, kind, key):
    with pytest.raises(kind, match=key):
        info_nce_loss(*inputs, **options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_integers_are_targets_and_ids(dtype):
    ids = T % 2
    wide = info_nce_loss(A, P, targets=T.flip(0), ignore=(ids, ids))
    assert torch.equal(info_nce_loss(A, P, targets=T.flip(0).to(dtype), ignore=[ids.to(dtype), ids.to(dtype)]), wide)
