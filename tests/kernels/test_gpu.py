"""What only a GPU can show: no host sync, CUDA graphs, streams. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import (
    guided_argmax,
    guided_log_probs,
    list_mle_loss,
    pairwise_cosine,
    raoe_loss,
    refine_similarity,
)
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


def guided_inputs(shape=(5, 1001), dtype=torch.float32, device="cuda"):
    seeded = torch.Generator().manual_seed(shape[1])
    current, previous = (4 * torch.randn(shape, generator=seeded) for _ in range(2))
    current[:, 3] = previous[:, 3] = current[:, 7] = -torch.inf
    return [x.to(device, dtype).requires_grad_() for x in (current, previous)]


def guided_step(current, previous, backend):
    """The gradient is that of half the mean square of a row; what is infinite is ignored."""
    mixed = guided_log_probs(current, previous, guidance=1.5, backend=backend)
    grads = torch.autograd.grad(mixed, (current, previous), mixed.detach() / mixed.shape[-1])
    return mixed, guided_argmax(current, previous, guidance=1.5, backend=backend), *grads


def listwise_inputs(shape=(6, 33), dtype=torch.float32, device="cuda"):
    chains, n = shape
    seeded = torch.Generator().manual_seed(n)
    phi = torch.rand(chains, n, n, generator=seeded).to(device, dtype)
    student = (2 * torch.rand(chains * n, n, generator=seeded) - 1).to(device, dtype)
    mask = (torch.arange(n) < torch.randint(0, n + 1, (chains, 1), generator=seeded)).to(device)
    return [student.requires_grad_(), phi, mask]


def listwise_step(student, phi, mask, backend, ties="ordinal"):
    n = phi.shape[-1]
    teacher = refine_similarity(phi, 0.5, mask=mask, backend=backend)
    listed = (mask[:, None] & mask[:, :, None]).reshape(-1, n)
    loss = list_mle_loss(student, teacher.reshape(-1, n), mask=listed, ties=ties, backend=backend)
    return teacher, loss, *torch.autograd.grad(loss, student)


STEPS = [
    pytest.param(guided_step, guided_inputs, "scan", id="guided-scan"),
    pytest.param(guided_step, guided_inputs, "triton", id="guided-triton"),
    pytest.param(listwise_step, listwise_inputs, "scan", id="listwise-scan"),
]


@pytest.mark.parametrize(("step", "make", "backend"), STEPS)
def test_guided_and_listwise_have_no_sync(step, make, backend):
    inputs = make()
    step(*inputs, backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*inputs, backend)
        if step is listwise_step:
            step(*inputs, backend, ties="random")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("step", "make", "backend"), STEPS)
def test_guided_and_listwise_in_a_cuda_graph(step, make, backend):
    inputs = make()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*inputs, backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*inputs, backend)
    with torch.no_grad():
        for x in inputs:
            x.copy_(x.flip(0))
    graph.replay()
    for x, y in zip(captured, step(*inputs, backend), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [32000, 50257], ids=["aligned", "odd"])
@pytest.mark.parametrize("backend", ["scan", "triton"])
def test_guided_agrees_with_the_cpu(backend, columns, dtype):
    inputs = guided_inputs((300, columns), dtype)
    mixed, best, *grads = guided_step(*inputs, backend)
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    truth, _, *true_grads = guided_step(*wide, "scan")
    eps = torch.finfo(mixed.dtype).eps
    torch.testing.assert_close(mixed.cpu().double(), truth, rtol=0, atol=100 * eps)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # float16's grid next to 0
    for x, t in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(
            x.cpu().double(), t, rtol=2 * torch.finfo(dtype).eps, atol=100 * eps * t.abs().max().item() + smallest
        )
    chosen = truth.gather(1, best.cpu()[:, None])[:, 0]
    assert (truth.amax(1) - chosen).max() <= 100 * eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_listwise_agrees_with_the_cpu(dtype):
    student, phi, mask = listwise_inputs((40, 33), dtype)
    teacher, loss, grad = listwise_step(student, phi, mask, "scan")
    wide = student.detach().cpu().double().requires_grad_()
    truth, true_loss, true_grad = listwise_step(wide, phi.cpu(), mask.cpu(), "scan")
    eps = torch.finfo(teacher.dtype).eps
    torch.testing.assert_close(teacher.cpu().double(), truth.double(), rtol=0, atol=8 * eps)
    torch.testing.assert_close(loss.cpu().double(), true_loss, rtol=100 * eps, atol=0)
    largest = true_grad.abs().max().item()
    torch.testing.assert_close(
        grad.cpu().double(), true_grad, rtol=2 * torch.finfo(dtype).eps, atol=200 * eps * largest
    )
