"""Attention on a GPU: no host sync, CUDA graphs, agreement with float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import bidirectional_attention, dual_attention
from raoe_kernels.testing import GRADIENT_FACTOR, LOSS_FACTOR, ULPS, assert_accurate
from tests.kernels.attention_cases import Batch
from tests.kernels.gpu_checks import close, flip, needs_gpu, no_sync, replays

pytestmark = needs_gpu
BACKENDS = pytest.mark.parametrize("backend", ["scan", "triton"])
FORMS = pytest.mark.parametrize("form", ["lengths", "left", "packed"])
OPTIONS = [None, {"causal": True}, {"dropout_p": 0.3}, {"causal": True, "dropout_p": 0.3}]


def attention_step(form: str, backend: str, **extra):
    """A call that attends and differentiates in the same places each time, and the places."""
    batch = Batch(form, [70, 0, 33, 1], 70, heads=(4, 2), d=64, dtype=torch.bfloat16, rubbish=0.0)
    inputs = [x.cuda().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    upstream = [x.cuda() for x in batch.upstream]
    where = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in batch.where.items()}

    def step():
        results = dual_attention(*inputs, **where, backend=backend)
        single = bidirectional_attention(*inputs, **where, **extra, causal=True, backend=backend)
        return *results, single, *torch.autograd.grad((*results, single), inputs, (*upstream, upstream[0]))

    return step, inputs, where


@BACKENDS
@FORMS
def test_no_sync(form, backend):
    step, _, _ = attention_step(form, backend, dropout_p=0.1)
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


# with dropout, scan uses torch's own random numbers
@pytest.mark.parametrize("backend, extra", [*(("triton", extra) for extra in OPTIONS), ("scan", None),
                                            ("scan", {"causal": True})])  # fmt: skip
@FORMS
@pytest.mark.parametrize("d", [20, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_agrees_with_float64(extra, dtype, d, form, backend):
    """dual_attention's two results (extra: None), or bidirectional_attention's one, against the reference in float64:
    on the CPU, or with `extra` on the GPU, which draws the same seed of dropout. Twice (gradients: three times) the
    error of the specification in this dtype, and four roundings; 32 in float64, where the truth is rounded as often,
    and 8 in float32 for torch's kernels, which subtract rounded terms where a gradient is exactly 0."""
    dual, extra = extra is None, extra or {}
    options = dict(lengths=[130, 0, 33, 1], longest=130, heads=(4, 2), d=d, dtype=dtype)
    truth = Batch(form, device="cuda" if extra else "cpu", **options)
    plain = truth.run(dual, "reference", **extra)
    truth.q, truth.k, truth.v = (x.double() for x in (truth.q, truth.k, truth.v))
    truth.upstream = [x.double() for x in truth.upstream]
    ours = Batch(form, device="cuda", **options).run(dual, backend, **extra)
    more = {torch.float64: 8, torch.float32: 2 if backend == "scan" else 1}
    roundings = ULPS * more.get(dtype, 1)
    for i, (x, p, t) in enumerate(zip(ours, plain, truth.run(dual, "reference", **extra), strict=True)):
        floor = roundings * torch.finfo(dtype).eps * max(1.0, t.abs().max().item())
        assert_accurate(f"result {i}", x, p, t, factor=LOSS_FACTOR if i < 1 + dual else GRADIENT_FACTOR, floor=floor)


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("extra", OPTIONS)
@FORMS
@pytest.mark.parametrize("d", [20, 64])
def test_tf32(extra, d, form, tf32):
    """TF32 keeps 10 bits of each factor. The errors of the factors of five products may add up: at most 16 roundings of
    2^-10, relative to the largest number. Never run on a GPU. (TF32 needs sm_80.)"""
    dual, extra = extra is None, extra or {}
    options = dict(lengths=[130, 0, 33, 1], longest=130, heads=(4, 2), d=d)
    ours = Batch(form, device="cuda", dtype=torch.float32, **options).run(dual, "triton", **extra)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    exact = Batch(form, device="cuda", dtype=torch.float32, **options).run(dual, "triton", **extra)
    for x, y in zip(ours, exact, strict=True):
        limit = 16 * 2**-10 * max(1.0, y.abs().max().item())
        assert 0 < (x - y).abs().max().item() <= limit


@pytest.mark.parametrize("extra", OPTIONS)
@FORMS
@pytest.mark.parametrize("d", [20, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_short_sentences(extra, dtype, d, form, monkeypatch):
    """Off by default; against the tiles for all lengths. Never run on a GPU."""
    from raoe_kernels.attention import triton_kernels

    dual, extra = extra is None, extra or {}
    batch = Batch(form, [31, 0, 14, 1], 31, heads=(4, 2), d=d, dtype=dtype, device="cuda")
    expected = batch.run(dual, "triton", **extra)
    monkeypatch.setattr(triton_kernels, "SHORT_TILES", (16, 32))
    for x, y in zip(batch.run(dual, "triton", **extra), expected, strict=True):
        limit = 4 * ULPS * torch.finfo(dtype).eps * max(1.0, y.abs().max().item())
        assert (x - y).abs().max().item() <= limit
