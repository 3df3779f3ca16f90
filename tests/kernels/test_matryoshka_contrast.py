"""info_nce_loss with dims: all prefix widths from one sweep."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import info_nce_loss
from raoe_kernels.infonce import triton_kernels
from raoe_kernels.infonce.problem import WIDTHS
from raoe_kernels.infonce.widths import scan
from raoe_kernels.testing import assert_gradient_accurate, assert_loss_accurate
from tests.kernels.conftest import DEVICE, PLACES

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
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


def matrices(n=7, p=9, m=5, columns=43, dtype=torch.float64, device="cpu"):
    seeded = torch.Generator().manual_seed(n * 100 + columns)
    sizes = [count for count in (n, p, m) if count]
    made = [torch.randn(count, columns, generator=seeded, dtype=torch.float64) for count in sizes]
    return [(x * torch.linspace(0.2, 3, len(x), dtype=x.dtype)[:, None]).to(dtype).to(device) for x in made]


def options(name, n, columns, device):
    """Keywords of a form by name, the same on every device."""
    seeded = torch.Generator().manual_seed(len(name))
    found = {"symmetric": "symmetric" in name, "scale": 60.0 if "sharp" in name else 20.0}
    if "targets" in name:
        found["targets"] = torch.randint(columns, (n,), generator=seeded).to(device)
    if "mask" in name:
        found["ignore"] = (torch.rand(n, columns, generator=seeded) < 0.4).to(device)
    if "ids" in name:
        ids = [torch.randint(4, (count,), generator=seeded).to(device) for count in (n, columns)]
        found["ignore"] = tuple(ids)
    return found


def run(given, dims, backend, upstream=UPSTREAM, **keywords):
    given = [x.detach().clone().requires_grad_() for x in given]
    losses = info_nce_loss(*given, dims=dims, backend=backend, **keywords)
    return losses.detach(), *torch.autograd.grad(losses, given, losses.new_tensor(upstream))


FORMS = ["plain", "symmetric", "targets", "targets-symmetric-mask", "ids", "targets-symmetric-ids", "sharp-mask"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("upstream", [UPSTREAM, (1.5,) * 4], ids=["each", "equal"])
def test_against_the_reference(form, dtype, upstream, swept, poisoned, monkeypatch):
    monkeypatch.setattr(scan, "BUFFER", 4 * 14 * 3 * 4)  # three rows of float32 at a time
    monkeypatch.setattr(scan, "NARROW", 13)  # three segments column by column, the last row by row
    by_the_rule(form, dtype, upstream, *swept)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("plain", torch.float32), ("targets-symmetric-ids", torch.bfloat16)])
def test_triton_against_the_reference(form, dtype, poisoned, monkeypatch):
    """A loss of one width for each, by its kernels."""
    real, found = triton_kernels.forward, []
    monkeypatch.setattr(triton_kernels, "forward", lambda *of: (found.append(of[0].anchors.shape[1]), real(*of))[1])
    by_the_rule(form, dtype, UPSTREAM, DEVICE, "triton")
    assert found[:4] == list(DIMS)


def by_the_rule(form, dtype, upstream, device, backend):
    if backend in ("auto", "triton"):  # each width has errors of its own, which the weights add up
        for alone in torch.tensor(upstream).diag().tolist():
            of_one_weighting(form, dtype, alone, device, backend)
    else:
        of_one_weighting(form, dtype, upstream, device, backend)


def of_one_weighting(form, dtype, upstream, device, backend):
    keywords = options(form, 7, 14, device)
    on_cpu = options(form, 7, 14, "cpu")
    losses, *grads = run(matrices(dtype=dtype, device=device), DIMS, backend, upstream, **keywords)
    plain, *plain_grads = run(matrices(dtype=dtype), DIMS, "reference", upstream, **on_cpu)
    truth, *true_grads = run([x.double() for x in matrices(dtype=dtype)], DIMS, "reference", upstream, **on_cpu)
    reach = 2 * on_cpu["scale"]
    assert losses.shape == (4,) and losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_loss_accurate(losses, plain, truth, reach)
    for gradient, of_plain, of_truth in zip(grads, plain_grads, true_grads, strict=True):
        assert gradient.dtype == dtype
        assert_gradient_accurate(gradient, of_plain, of_truth, reach)


@pytest.mark.parametrize("form", FORMS)
def test_each_width_is_a_call_of_its_own(form, swept):
    """By what one width gives, of rows that are cut."""
    device, backend = swept
    given, keywords = matrices(device=device), options(form, 7, 14, device)
    losses, *grads = run(given, DIMS, backend, **keywords)
    sums = [torch.zeros_like(x) for x in given]
    for k, width in enumerate(DIMS):
        cut = [x[:, :width].clone().requires_grad_() for x in given]
        loss = info_nce_loss(*cut, backend="reference", **keywords)
        torch.testing.assert_close(losses[k], loss.detach())
        for total, gradient in zip(sums, torch.autograd.grad(loss, cut), strict=True):
            total[:, :width] += UPSTREAM[k] * gradient
    for gradient, total in zip(grads, sums, strict=True):
        torch.testing.assert_close(gradient, total)
        assert gradient[:, 40:].eq(0).all()


@pytest.mark.parametrize(("n", "p", "m"), [(1, 1, 0), (1, 3, 0), (5, 5, 0), (33, 40, 25), (64, 64, 64)])
def test_sizes(n, p, m, swept, poisoned):
    device, backend = swept
    given = matrices(n, p, m, dtype=torch.float32, device=device)
    ours = run(given, (5, 43), backend, (1.0, 1.0))
    plain = run(given, (5, 43), "reference", (1.0, 1.0))
    truth = run([x.double() for x in given], (5, 43), "reference", (1.0, 1.0))
    assert_loss_accurate(ours[0], plain[0], truth[0], 40.0)
    for gradient, of_plain, of_truth in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert_gradient_accurate(gradient, of_plain, of_truth, 40.0)


def test_zero_prefixes_have_similarity_and_gradient_zero(swept, poisoned):
    device, backend = swept
    given = matrices(dtype=torch.float32, device=device)
    given[0][2, :4], given[1][3], given[2][1, :17] = 0, 0, 1e-10
    losses, *grads = run(given, DIMS, backend)
    truth, *true_grads = run([x.double() for x in given], DIMS, "reference")
    torch.testing.assert_close(losses, truth.float(), rtol=1e-5, atol=1e-6)
    for gradient, of_truth in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(gradient, of_truth.float(), rtol=1e-4, atol=1e-5)
    assert grads[1][3].eq(0).all() and grads[2][1, :17].ne(0).any() and grads[0].isfinite().all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_spoils_the_widths_that_hold_it(which, swept):
    device, backend = swept
    given = matrices(dtype=torch.float32, device=device)
    given[which][1, 10] = torch.nan
    losses, *grads = run(given, DIMS, backend)
    assert losses[:2].isfinite().all() and losses[2:].isnan().all()
    assert all(gradient.isnan().any() for gradient in grads)


def test_no_anchors(swept):
    device, backend = swept
    none, some = torch.zeros(0, 4, device=device, requires_grad=True), torch.ones(3, 4, device=device)
    losses = info_nce_loss(none, some, dims=(2, 4), backend=backend)
    losses.sum().backward()
    assert losses.tolist() == [0, 0] and none.grad.shape == (0, 4)


def test_several_chunks_of_rows():
    given = matrices(700, 1100, 0, 24, dtype=torch.float32)
    truth = run([x.double() for x in given], (6, 24), "reference", (1.0, 2.0))
    for x, y in zip(run(given, (6, 24), "scan", (1.0, 2.0)), truth, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)
