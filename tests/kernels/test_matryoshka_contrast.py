"""info_nce_loss with dims: all prefix widths from one sweep."""

import pytest
import torch

from raoe_kernels import info_nce_loss
from raoe_kernels.infonce import triton_kernels
from raoe_kernels.infonce.problem import WIDTHS
from raoe_kernels.infonce.widths import scan
from raoe_kernels.testing import assert_gradient_accurate
from tests.kernels.conftest import DEVICE, PLACES
from tests.kernels.contrast_cases import INFONCE, rows
from tests.kernels.pairwise_cases import EVERY_DTYPE

SIZES = (7, 9, 5)
DIMS = (3, 4, 17, 40)
UPSTREAM = (0.5, -2.0, 1.25, 0.75)


# Triton's interpreter takes minutes for all of these: it has a test of its own.
@pytest.fixture(params=[here for here in PLACES if here != ("cpu", "triton")], ids="-".join)
def swept(request):
    """(device, backend) of a backend that makes all widths; one that cannot says so, and is left out by auto."""
    device, backend = request.param
    if WIDTHS.available(torch.device(device))[backend] is True:
        return request.param
    x = torch.ones(2, 4, device=device)
    with pytest.raises(RuntimeError, match=f"'{backend}' cannot run info_nce_loss of several widths"):
        info_nce_loss(x, x, dims=(2, 4), backend=backend)
    return device, "auto"


FORMS = ["plain", "symmetric", "targets", "mask", "ids", "mask-targets-symmetric", "ids-targets-symmetric"]


@EVERY_DTYPE
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("upstream", [UPSTREAM, (1.5,) * 4], ids=["each", "equal"])
def test_against_the_reference(form, dtype, upstream, swept, poisoned, monkeypatch):
    monkeypatch.setattr(scan, "BUFFER", 4 * 14 * 3 * 4)  # three rows of float32 at a time
    monkeypatch.setattr(scan, "NARROW", 13)  # three segments column by column, the last row by row
    by_the_rule(form, dtype, upstream, *swept)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("plain", torch.float32), ("ids-targets-symmetric", torch.bfloat16)])
def test_triton_against_the_reference(form, dtype, poisoned, monkeypatch):
    """A loss of one width for each, by its kernels."""
    real, found = triton_kernels.forward, []
    monkeypatch.setattr(triton_kernels, "forward", lambda *of: (found.append(of[0].anchors.shape[1]), real(*of))[1])
    by_the_rule(form, dtype, UPSTREAM, DEVICE, "triton")
    assert found[:4] == list(DIMS)


def by_the_rule(form, dtype, upstream, device, backend):
    # of "auto" each width has errors of its own, which the weights add up
    alone = torch.tensor(upstream).diag().tolist() if backend in ("auto", "triton") else [upstream]
    for weights in alone:
        of_sizes(SIZES, form, dtype, device, backend, dims=DIMS, upstream=weights)


def of_sizes(*asked, **more):
    ours, plain, truth, spread = INFONCE.three(*asked[:1], 43, *asked[1:], **more)
    assert ours[0].shape == (len(more["dims"]),)
    for gradient, of_plain, of_truth in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert gradient.dtype == asked[2]
        assert_gradient_accurate(gradient, of_plain, of_truth, spread)


@pytest.mark.parametrize("form", FORMS)
def test_each_width_is_a_call_of_its_own(form, swept):
    """By what one width gives, of rows that are cut."""
    device, backend = swept
    given, keywords = rows(SIZES, 43, torch.float64, device), INFONCE.options(form, 7, 14, device)
    losses, *grads = INFONCE.run(given, backend, UPSTREAM, dims=DIMS, **keywords)
    sums = [torch.zeros_like(x) for x in given]
    for k, width in enumerate(DIMS):
        loss, *alone = INFONCE.run([x[:, :width] for x in given], "reference", UPSTREAM[k], **keywords)
        torch.testing.assert_close(losses[k], loss)
        for total, gradient in zip(sums, alone, strict=True):
            total[:, :width] += gradient
    for gradient, total in zip(grads, sums, strict=True):
        torch.testing.assert_close(gradient, total)


@pytest.mark.parametrize("sizes", [(1, 1, None), (1, 3, None), (5, 5, None), (33, 40, 25), (64, 64, 64)])
def test_sizes(sizes, swept, poisoned):
    of_sizes(sizes, "plain", torch.float32, *swept, dims=(5, 43), upstream=1.0)


def test_zero_prefixes_have_similarity_and_gradient_zero(swept, poisoned):
    device, backend = swept
    given = rows(SIZES, 43, torch.float32, device)
    given[0][2, :4], given[1][3], given[2][1, :17] = 0, 0, 1e-10
    losses, *grads = INFONCE.run(given, backend, UPSTREAM, dims=DIMS)
    truth, *true_grads = INFONCE.run([x.double() for x in given], "reference", UPSTREAM, dims=DIMS)
    torch.testing.assert_close(losses, truth.float(), rtol=1e-5, atol=1e-6)
    for gradient, of_truth in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(gradient, of_truth.float(), rtol=1e-4, atol=1e-4)
    assert grads[1][3].eq(0).all() and grads[2][1, :17].ne(0).any() and grads[0].isfinite().all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_spoils_the_widths_that_hold_it(which, swept):
    device, backend = swept
    given = rows(SIZES, 43, torch.float32, device)
    given[which][1, 10] = torch.nan
    losses, *grads = INFONCE.run(given, backend, UPSTREAM, dims=DIMS)
    assert losses[:2].isfinite().all() and losses[2:].isnan().all()
    assert all(gradient.isnan().any() for gradient in grads)
