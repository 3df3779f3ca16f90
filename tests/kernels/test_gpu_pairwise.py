"""The pairwise losses and cosine on a GPU: no host sync, CUDA graphs, streams, large batches."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import pairwise_cosine, raoe_loss
from tests.kernels.gpu_checks import flip, needs_gpu, no_sync, replays
from tests.kernels.pairwise_cases import Case

pytestmark = needs_gpu
BACKENDS = ["scan", "triton", "native"]
# Triton's kernel takes 2,048 pairs.
SIZES = pytest.mark.parametrize(
    ("backend", "pairs"), [(b, n) for b in BACKENDS for n in (300, 2000, 4000, 9000) if b != "triton" or n <= 2000]
)


def batch(pairs: int, classes: int = 3):
    return Case(f"gpu-{classes}", "raoe_loss", pairs, classes=classes).inputs(torch.float32, "cuda")


def step(similarity, scores, labels, backend: str):
    loss = raoe_loss(similarity, scores, labels, backend=backend)
    return loss, torch.autograd.grad(loss, similarity)[0]


@SIZES
def test_no_device_to_host_sync(backend, pairs):
    similarity, scores, labels = batch(pairs)
    similarity.requires_grad_()
    step(similarity, scores, labels, backend)  # compiles
    with no_sync():
        step(similarity, scores, labels, backend)


@SIZES
@pytest.mark.parametrize("classes", [3, 40])
def test_cuda_graph(backend, classes, pairs):
    similarity, scores, labels = batch(pairs, classes)
    similarity.requires_grad_()
    # Parts of them: all flipped alike would only permute the pairs.
    replays(lambda: step(similarity, scores, labels, backend), flip(similarity, scores[:7], labels[:200]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_stream(backend):
    similarity, scores, labels = batch(2000 if backend == "triton" else 9000)
    similarity.requires_grad_()
    expected = step(similarity, scores, labels, backend)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        loss, grad = step(similarity, scores, labels, backend)
    stream.synchronize()
    assert torch.equal(loss, expected[0]) and torch.equal(grad, expected[1])


@pytest.mark.parametrize("backend", ["scan", "native"])
def test_a_million_pairs_agree_with_the_cpu(backend):
    similarity, scores, labels = Case("million", "raoe_loss", 1 << 20).inputs(torch.float32, "cpu")
    on_gpu = [x.cuda() for x in (similarity, scores, labels)]
    loss, grad = step(on_gpu[0].requires_grad_(), *on_gpu[1:], backend)
    truth, true_grad = step(similarity.double().requires_grad_(), scores, labels, "scan")
    torch.testing.assert_close(loss.cpu().double(), truth, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.cpu().double(), true_grad, rtol=1e-3, atol=1e-5 * true_grad.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
def test_cosine_has_no_sync_and_captures(backend):
    a, b = (torch.randn(100, 384, device="cuda", requires_grad=True) for _ in range(2))

    def cosine():
        c = pairwise_cosine(a, b, backend=backend)
        return c, *torch.autograd.grad(c.sum(), (a, b))

    cosine()
    with no_sync():
        cosine()
    replays(cosine, flip(a))
