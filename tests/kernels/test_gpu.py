"""What only a GPU can show: no host sync, CUDA graphs, streams. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import dual_attention, pairwise_cosine, raoe_loss
from raoe_kernels.testing import GRADIENT_FACTOR, LOSS_FACTOR, ULPS, assert_accurate
from tests.kernels.attention_cases import Batch
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


ATTENTIONS = pytest.mark.parametrize("backend", ["scan", "triton"])
ATTENTION_FORMS = pytest.mark.parametrize("form", ["lengths", "left", "packed"])


def attention_step(form: str, backend: str):
    """A call that attends and differentiates in the same places each time, and the places."""
    batch = Batch(form, [70, 0, 33, 1], 70, heads=(4, 2), d=64, dtype=torch.bfloat16, rubbish=0.0)
    inputs = [x.cuda().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    upstream = [x.cuda() for x in batch.upstream]
    where = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in batch.where.items()}

    def step():
        results = dual_attention(*inputs, **where, backend=backend)
        return *results, *torch.autograd.grad(results, inputs, upstream)

    return step, inputs, where


@ATTENTIONS
@ATTENTION_FORMS
def test_attention_has_no_sync(form, backend):
    step, _, _ = attention_step(form, backend)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ATTENTIONS
@ATTENTION_FORMS
def test_attention_in_a_cuda_graph(form, backend):
    step, inputs, where = attention_step(form, backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():  # other tokens, and sentences of other lengths
        inputs[0].copy_(inputs[0].flip(0))
        if form == "packed":
            where["cu_seqlens"].copy_(torch.tensor([0, 1, 34, 34, 104]))
        else:
            next(iter(where.values())).copy_(next(iter(where.values())).flip(0))
    graph.replay()
    for x, y in zip(captured, step(), strict=True):
        torch.testing.assert_close(x, y)


@ATTENTIONS
@ATTENTION_FORMS
@pytest.mark.parametrize("d", [20, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attention_agrees_with_float64_on_the_cpu(dtype, d, form, backend):
    """Twice (gradients: three times) the error of the specification in this dtype, and four roundings."""
    options = dict(lengths=[130, 0, 33, 1], longest=130, heads=(4, 2), d=d, dtype=dtype)
    truth = Batch(form, **options)
    plain = truth.run(True, "reference")
    truth.q, truth.k, truth.v = (x.double() for x in (truth.q, truth.k, truth.v))
    truth.upstream = [x.double() for x in truth.upstream]
    ours = Batch(form, device="cuda", **options).run(True, backend)
    for i, (x, p, t) in enumerate(zip(ours, plain, truth.run(True, "reference"), strict=True)):
        floor = ULPS * torch.finfo(dtype).eps * max(1.0, t.abs().max().item())
        assert_accurate(f"result {i}", x, p, t, factor=LOSS_FACTOR if i < 2 else GRADIENT_FACTOR, floor=floor)
