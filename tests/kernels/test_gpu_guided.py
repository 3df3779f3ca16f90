"""Guided decoding and the listwise ops on a GPU: no host sync, CUDA graphs, agreement with float64 on the CPU."""

import pytest
import torch

from raoe_kernels import guided_argmax, guided_log_probs, list_mle_loss, refine_similarity
from tests.kernels.gpu_checks import flip, needs_gpu, no_sync, replays

pytestmark = needs_gpu


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
def test_no_sync(step, make, backend):
    inputs = make()
    step(*inputs, backend)
    with no_sync():
        step(*inputs, backend)
        if step is listwise_step:
            step(*inputs, backend, ties="random")


@pytest.mark.parametrize(("step", "make", "backend"), STEPS)
def test_cuda_graph(step, make, backend):
    inputs = make()
    replays(lambda: step(*inputs, backend), flip(*inputs))


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
