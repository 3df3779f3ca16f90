"""InfoNCE and the sigmoid loss on a GPU: no host sync, CUDA graphs, float64 on the CPU, equal bits, memory."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels.infonce import chunks
from tests.kernels.contrast_cases import INFONCE, SIGMOID
from tests.kernels.gpu_checks import close, flip, needs_gpu, no_sync, replays

pytestmark = needs_gpu
CONTRASTS = pytest.mark.parametrize("contrast", [INFONCE, SIGMOID], ids=str)


def stepped(contrast, inputs, backend: str, **options):
    loss = contrast(inputs, backend=backend, **options)
    return loss, *torch.autograd.grad(loss, inputs)


def inputs_of(contrast, sizes, width: int, dtype: torch.dtype):
    seeded = torch.Generator().manual_seed(width)
    rows = [torch.randn(n, width, generator=seeded).to("cuda", dtype) for n in sizes]
    return [x.requires_grad_() for x in contrast.leaves(rows)]


@CONTRASTS
@pytest.mark.parametrize("backend", ["scan", "triton"])
def test_no_sync_and_cuda_graph(backend, contrast):
    inputs = inputs_of(contrast, (300, 320, 100), 384, torch.bfloat16)
    ids = torch.arange(300, device="cuda") % 90, torch.arange(420, device="cuda") % 90
    more = contrast.also or {"positive_ids": ids}
    targets = torch.arange(300, device="cuda").flip(0) + contrast.lowest

    def step():
        return stepped(contrast, inputs, backend, ignore=ids, targets=targets, **more)

    step()
    with no_sync():
        step()
    replays(step, flip(*inputs[:3]), close)  # cuBLAS may take another algorithm on another stream


@CONTRASTS
@pytest.mark.parametrize("width", [384, 385])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["scan", "triton"])
def test_agrees_with_float64_on_the_cpu(backend, dtype, width, contrast):
    inputs = inputs_of(contrast, (1000, 1000, 3500), width, dtype)  # more than one block of columns
    ours = stepped(contrast, inputs, backend)
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    truth = stepped(contrast, exact, "scan")
    torch.testing.assert_close(ours[0].cpu().double(), truth[0], rtol=1e-5, atol=0)
    for x, y in zip(ours[1:], truth[1:], strict=True):
        largest = y.abs().max().item()
        bound = max(1e-4, 3 * torch.finfo(dtype).eps)
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # float16's grid next to 0
        torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=bound * largest + smallest)


@CONTRASTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_calls_give_equal_bits(dtype, contrast, monkeypatch):
    monkeypatch.setattr(chunks, "BUFFER", 1)  # chunks of 1,024 rows
    inputs = inputs_of(contrast, (3000, 3000, 500), 384, dtype)
    targets = torch.arange(3000, device="cuda") // 2
    first, second = (stepped(contrast, inputs, "triton", targets=targets, **contrast.also) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# Triton's: 268 MB of InfoNCE's weights, 230 of the sigmoid loss's logits and weights, 21 of scaled rows and 34 of
# gradients in float32. Scan's 393 of InfoNCE were measured.
@CONTRASTS
@pytest.mark.parametrize("backend, limit", [("scan", 0.75), ("triton", 0.65)])
def test_does_not_hold_the_logits(backend, limit, contrast):
    """Extra memory as a share of one bfloat16 matrix of logits (537 MB here; inputs and gradients are 6 % of it)."""
    inputs = inputs_of(contrast, (16384, 16384), 256, torch.bfloat16)
    stepped(contrast, inputs, backend)  # compiles, and takes cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stepped(contrast, inputs, backend)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < limit * 2 * 16384**2
