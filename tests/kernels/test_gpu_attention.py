"""Attention on a GPU: no host sync, CUDA graphs, agreement with float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import dual_attention
from raoe_kernels.testing import GRADIENT_FACTOR, LOSS_FACTOR, ULPS, assert_accurate
from tests.kernels.attention_cases import Batch
from tests.kernels.gpu_checks import close, flip, needs_gpu, no_sync, replays

pytestmark = needs_gpu
BACKENDS = pytest.mark.parametrize("backend", ["scan", "triton"])
FORMS = pytest.mark.parametrize("form", ["lengths", "left", "packed"])


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


@BACKENDS
@FORMS
def test_no_sync(form, backend):
    step, _, _ = attention_step(form, backend)
    step()
    with no_sync():
        step()


@BACKENDS
@FORMS
def test_cuda_graph(form, backend):
    step, inputs, where = attention_step(form, backend)

    def change():
        """Other tokens, and sentences of other lengths."""
        flip(inputs[0])()
        if form == "packed":
            where["cu_seqlens"].copy_(torch.tensor([0, 1, 34, 34, 104]))
        else:
            flip(next(iter(where.values())))()

    replays(step, change, torch.equal if backend == "triton" else close)


@BACKENDS
@FORMS
@pytest.mark.parametrize("d", [20, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_agrees_with_float64_on_the_cpu(dtype, d, form, backend):
    """Twice (gradients: three times) the error of the specification in this dtype, and four roundings; 32 in float64,
    where the truth is rounded as often."""
    options = dict(lengths=[130, 0, 33, 1], longest=130, heads=(4, 2), d=d, dtype=dtype)
    truth = Batch(form, **options)
    plain = truth.run(True, "reference")
    truth.q, truth.k, truth.v = (x.double() for x in (truth.q, truth.k, truth.v))
    truth.upstream = [x.double() for x in truth.upstream]
    ours = Batch(form, device="cuda", **options).run(True, backend)
    for i, (x, p, t) in enumerate(zip(ours, plain, truth.run(True, "reference"), strict=True)):
        floor = ULPS * torch.finfo(dtype).eps * max(1.0, t.abs().max().item()) * (8 if dtype == torch.float64 else 1)
        assert_accurate(f"result {i}", x, p, t, factor=LOSS_FACTOR if i < 2 else GRADIENT_FACTOR, floor=floor)
