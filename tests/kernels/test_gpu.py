"""What only a GPU can show: no host sync, CUDA graphs, streams. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import info_nce_loss, pairwise_cosine, raoe_loss
from tests.kernels.conftest import HAS_GPU
from tests.kernels.pairwise_cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA device")]
BACKENDS = ["scan", "triton", "native"]
SIZES = [300, 9000]


def batch(pairs: int, classes: int = 3):
    return Case(f"gpu-{classes}", "raoe_loss", pairs, classes=classes).inputs(torch.float32, "cuda")


def step(similarity, scores, labels, backend: str):
    loss = raoe_loss(similarity, scores, labels, backend=backend)
    return loss, torch.autograd.grad(loss, similarity)[0]


@pytest.mark.parametrize("pairs", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_device_to_host_sync(backend, pairs):
    similarity, scores, labels = batch(pairs)
    similarity.requires_grad_()
    step(similarity, scores, labels, backend)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(similarity, scores, labels, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pairs", SIZES)
@pytest.mark.parametrize("classes", [3, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_graph(backend, classes, pairs):
    similarity, scores, labels = batch(pairs, classes)
    similarity.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(similarity, scores, labels, backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(similarity, scores, labels, backend)
    with torch.no_grad():  # other values in the same places
        similarity.copy_(similarity.flip(0))
        scores.copy_(scores.roll(7))
        labels.copy_(labels.roll(3))
    graph.replay()
    expected = step(similarity, scores, labels, backend)
    for x, y in zip(captured, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_stream(backend):
    similarity, scores, labels = batch(9000)
    similarity.requires_grad_()
    expected = step(similarity, scores, labels, backend)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        loss, grad = step(similarity, scores, labels, backend)
    stream.synchronize()
    assert torch.equal(loss, expected[0]) and torch.equal(grad, expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_million_pairs_agree_with_the_cpu(backend):
    similarity, scores, labels = Case("million", "raoe_loss", 1 << 20).inputs(torch.float32, "cpu")
    on_gpu = [x.cuda() for x in (similarity, scores, labels)]
    loss, grad = step(on_gpu[0].requires_grad_(), *on_gpu[1:], backend)
    truth, true_grad = step(similarity.double().requires_grad_(), scores, labels, "scan")
    torch.testing.assert_close(loss.cpu().double(), truth, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.cpu().double(), true_grad, rtol=1e-3, atol=1e-5 * true_grad.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
def test_cosine_has_no_sync(backend):
    a, b = (torch.randn(100, 384, device="cuda", requires_grad=True) for _ in range(2))
    torch.autograd.grad(pairwise_cosine(a, b, backend=backend).sum(), (a, b))
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(pairwise_cosine(a, b, backend=backend).sum(), (a, b))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_training_step(backend):
    similarity, scores, labels = batch(64)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, _ = step(similarity.bfloat16().requires_grad_(), scores, labels, backend)
    assert loss.dtype == torch.float32 and loss.isfinite()


def info_nce_step(inputs, backend: str, **options):
    loss = info_nce_loss(*inputs, backend=backend, **options)
    return loss, *torch.autograd.grad(loss, inputs)


def info_nce_inputs(sizes, width: int, dtype: torch.dtype):
    seeded = torch.Generator().manual_seed(width)
    return [torch.randn(n, width, generator=seeded).to("cuda", dtype).requires_grad_() for n in sizes]


@pytest.mark.parametrize("backend", ["scan", "triton"])
def test_info_nce_has_no_sync_and_captures(backend):
    inputs = info_nce_inputs((300, 320, 100), 384, torch.bfloat16)
    ids = torch.arange(300, device="cuda") % 90, torch.arange(420, device="cuda") % 90
    targets = torch.arange(300, device="cuda").flip(0)
    options = {"ignore": ids, "targets": targets, "symmetric": True}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            info_nce_step(inputs, backend, **options)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        info_nce_step(inputs, backend, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = info_nce_step(inputs, backend, **options)
    with torch.no_grad():
        for x in inputs:
            x.copy_(x.flip(0))
    graph.replay()
    for x, y in zip(captured, info_nce_step(inputs, backend, **options), strict=True):
        if backend == "triton":
            assert torch.equal(x, y)
        else:  # cuBLAS may take another algorithm on another stream
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("width", [384, 385])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["scan", "triton"])
def test_info_nce_agrees_with_float64_on_the_cpu(backend, dtype, width):
    inputs = info_nce_inputs((1000, 1000, 1500), width, dtype)
    ours = info_nce_step(inputs, backend)
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    truth = info_nce_step(exact, "scan")
    torch.testing.assert_close(ours[0].cpu().double(), truth[0], rtol=1e-5, atol=0)
    for x, y in zip(ours[1:], truth[1:], strict=True):
        largest = y.abs().max().item()
        bound = max(1e-4, 3 * torch.finfo(dtype).eps)
        torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=bound * largest)


@pytest.mark.parametrize("backend, limit", [("scan", 0.5), ("triton", 0.12)])
def test_info_nce_does_not_hold_the_logits(backend, limit):
    """Extra memory as a share of one bfloat16 matrix of logits (537 MB here; inputs and gradients are 6 % of it)."""
    inputs = info_nce_inputs((16384, 16384), 256, torch.bfloat16)
    info_nce_step(inputs, backend)  # compiles, and takes cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    info_nce_step(inputs, backend)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < limit * 2 * 16384**2
