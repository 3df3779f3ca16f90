"""The Triton form of info_nce_loss in half precision: norms, sums and weights near what its dtypes can hold."""

from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.conftest import HAS_GPU
from tests.kernels.contrast_cases import INFONCE, mapped, rows

pytestmark = [
    pytest.mark.slow,  # Triton's interpreter
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]
DEVICE = "cuda" if HAS_GPU else "cpu"
HALVES = [torch.float16, torch.bfloat16]


def compared(inputs, upstream=-1.5, plain=None, **given):
    """Of the Triton form, plain torch (by default the reference at the inputs' dtype), and float64, by the one rule."""
    ours = INFONCE.run([x.to(DEVICE) for x in inputs], "triton", upstream, **mapped(given, lambda x: x.to(DEVICE)))
    plain = plain or INFONCE.run(inputs, "reference", upstream, **given)
    truth = INFONCE.run([x.double() for x in inputs], "reference", upstream, **given)
    assert_loss_accurate(ours[0], plain[0], truth[0], 2 * given.get("scale", 20.0))
    for x, p, t in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert_gradient_accurate(x, p, t, 2 * given.get("scale", 20.0))
    return truth


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("powers", [(-12, -12), (-6, 13), (13, 13)])
def test_norms_leave_half_precision_its_range(dtype, powers):
    """2^13 is near float16's largest, and gradients are near it at 2^-12; rows of both norms in one matrix too."""
    a, p = (x.float() / x.float().norm(dim=1, keepdim=True) for x in rows((9, 9), 20, torch.float32))
    a, p = a * 2.0 ** powers[0], p * 2.0 ** powers[1]
    a[3] *= 2.0 ** (powers[1] - powers[0])
    compared([a.to(dtype), p.to(dtype)], scale=5.0)


def test_norms_beyond_float16(poisoned):
    a, p = rows((9, 9), 20, torch.float32)
    compared([(a * 1e15).bfloat16(), (p * 1e15).bfloat16()])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", [3, 64])
def test_anchors_that_share_a_target_add_up(dtype, n):
    """On the way back every row but the first looks for its anchor and finds the first, whose weight there comes to n:
    float16 must hold it."""
    a, p = rows((n, 4), 12, torch.float32)
    a[0] = p[2]
    targets = torch.full((n,), 2)
    targets[0] = 1
    compared([a.to(dtype), p.to(dtype)], targets=targets, symmetric=True)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_weights_of_a_learned_batch_keep_their_digits(dtype, symmetric):
    """Weights of e^-20, below what float16 has, whose gradients a loss scale brings back."""
    a = torch.eye(16, 24)
    noise, _ = rows((16, 16), 24, torch.float32)
    p = a + 0.02 * noise / noise.norm(dim=1, keepdim=True)
    leaves = [x.to(dtype).requires_grad_() for x in (a, p)]
    # torch's cross entropy subtracts 1 from the softmax, and so loses digits that the reference keeps
    logits = 20 * cosine_similarity(*(x.float() for x in (leaves[0][:, None], leaves[1][None])), dim=2)
    sides = (logits, logits.T) if symmetric else (logits,)
    loss = torch.stack([cross_entropy(side, torch.arange(16)) for side in sides]).mean()
    plain = (loss.detach(), *torch.autograd.grad(loss * 2.0**20, leaves))
    truth = compared([x.detach() for x in leaves], 2.0**20, plain, symmetric=symmetric)
    assert 0 < truth[0] < 1e-6 and truth[1].abs().max() > 1e-3
