"""bidirectional_attention and dual_attention: every backend x dtype against the float64 reference, and their edges."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from raoe_kernels import bidirectional_attention, dual_attention
from raoe_kernels.attention import sentences
from raoe_kernels.testing import GRADIENT_FACTOR, LOSS_FACTOR, ULPS, assert_accurate
from tests.kernels.attention_cases import FORMS, Batch
from tests.kernels.conftest import PLACES
from tests.kernels.pairwise_cases import EVERY_DTYPE

LENGTHS = [5, 0, 7, 1]
OPS = pytest.mark.parametrize("dual", [False, True], ids=["bidirectional", "dual"])
# And what bidirectional_attention takes besides. With dropout scan draws torch's numbers: tests of its masks follow.
CAUSAL, DROPOUT = {"causal": True}, {"dropout_p": 0.3}
WAYS = {"bidirectional": (False, {}), "dual": (True, {}), "causal": (False, CAUSAL), "dropout": (False, DROPOUT),
        "causal-dropout": (False, CAUSAL | DROPOUT)}  # fmt: skip
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


# Triton's interpreter takes seconds a call; test_triton_briefly is its fast test.
INTERPRETED = ("cpu", "triton")
OUR_PLACES = [
    pytest.param(p, marks=[pytest.mark.slow] if p == INTERPRETED else [], id="-".join(p))
    for p in PLACES
    if p[1] != "native"
]


@pytest.fixture(params=OUR_PLACES)
def place(request):
    return request.param


def skip_torch_s_dropout(backend, extra):
    if backend == "scan" and "dropout_p" in extra:
        pytest.skip("torch draws other numbers")


def assert_as_accurate_as_plain(ours, plain, truth, count):
    """The rule of raoe_kernels.testing; the roundings are of the values that cancel in a sum, so of size `largest`.
    In float64 there may be 32 of them, because the truth is rounded as often; Triton's causal result has 5."""
    for i, (x, p, t) in enumerate(zip(ours, plain, truth, strict=True)):
        assert x.dtype == p.dtype
        factor = LOSS_FACTOR if i < count else GRADIENT_FACTOR
        largest = max(1.0, t.abs().max().item()) if t.numel() else 0.0
        ulps = ULPS * (8 if x.dtype == torch.float64 else 1)
        assert_accurate(f"result {i}", x, p, t, factor=factor, floor=ulps * torch.finfo(x.dtype).eps * largest)


def agrees_with_the_reference(form, options, way, place):
    """Of a backend, the reference in the same dtype, and in float64, by the rule; the results of the backend."""
    (device, backend), (dual, extra) = place, WAYS[way]
    skip_torch_s_dropout(backend, extra)
    ours = Batch(form, device=device, **options).run(dual, backend, **extra)
    options = {**options, "device": device if extra else "cpu"}  # each device draws its own seed of dropout
    plain = Batch(form, **options).run(dual, "reference", **extra)
    wide = Batch(form, **options)
    wide.q, wide.k, wide.v = (x.double() for x in (wide.q, wide.k, wide.v))
    wide.upstream = [x.double() for x in wide.upstream]
    assert_as_accurate_as_plain(ours, plain, wide.run(dual, "reference", **extra), 1 + dual)
    return ours


@EVERY_FORM
@EVERY_WAY
@EVERY_DTYPE
def test_against_the_reference(dtype, way, form, place, poisoned):
    options = dict(lengths=LENGTHS, longest=7, heads=(4, 2), d=20, dtype=dtype)
    batch = Batch(form, **options)
    for x in agrees_with_the_reference(form, options, way, place):
        assert batch.padding(x).eq(0).all()
        assert batch.tokens(x).ne(0).any()


@pytest.mark.skipif(INTERPRETED not in PLACES, reason="Triton is compiled here, not interpreted")
@pytest.mark.parametrize("form, way", [("left", "dual"), ("packed", "bidirectional"), ("packed", "causal-dropout")])
def test_triton_briefly(form, way, poisoned):
    """Two tiles on either side of the diagonal, columns that are no power of two, grouped heads."""
    options = dict(lengths=[35, 3], longest=36, heads=(2, 1), d=20, dtype=torch.float32)
    agrees_with_the_reference(form, options, way, INTERPRETED)


def short_tiles(monkeypatch, tiles) -> list[str]:
    """Turn on tiles for short sentences, and one backward kernel for every dtype; the names of launched kernels."""
    from raoe_kernels.attention import triton_kernels

    monkeypatch.setattr(triton_kernels, "SHORT_TILES", tiles)
    monkeypatch.setattr(triton_kernels, "ONE_KERNEL", 1 << 20)
    launched, launch = [], triton_kernels._Call.launch

    def recorded(call, which, tensors):
        launched.append(triton_kernels.KERNELS[which].fn.__name__)
        launch(call, which, tensors)

    monkeypatch.setattr(triton_kernels._Call, "launch", recorded)
    return launched


@pytest.mark.skipif(INTERPRETED not in PLACES, reason="Triton is compiled here, not interpreted")
@pytest.mark.parametrize("tiles", [(), (16, 32)], ids=["off", "on"])
@pytest.mark.parametrize("longest, dtype", [(13, torch.float64), (31, torch.float32), (31, torch.bfloat16)])
@EVERY_WAY
@EVERY_FORM
def test_triton_tiles_of_short_sentences(form, way, longest, dtype, tiles, poisoned, monkeypatch):
    launched = short_tiles(monkeypatch, tiles)
    options = dict(lengths=[longest, 0, 1, longest // 2], longest=longest, heads=(4, 2), d=20, dtype=dtype)
    agrees_with_the_reference(form, options, way, INTERPRETED)
    backward = ["short"] if tiles else ["q", "kv"]
    assert launched == ["attention_forward", *(f"attention_backward_{name}" for name in backward)]


@pytest.mark.skipif(INTERPRETED not in PLACES, reason="Triton is compiled here, not interpreted")
@pytest.mark.parametrize("form, way, longest", [("left", "dual", 16), ("packed", "causal-dropout", 31)])
def test_tiles_of_short_sentences_briefly(form, way, longest, poisoned, monkeypatch):
    """A sentence that fills its tile, and one that does not."""
    launched = short_tiles(monkeypatch, (16, 32))
    options = dict(lengths=[longest, 0, 3], longest=longest, heads=(4, 2), d=20)
    agrees_with_the_reference(form, {**options, "dtype": torch.float64}, way, INTERPRETED)
    assert launched == ["attention_forward", "attention_backward_short"]


@pytest.mark.skipif(INTERPRETED not in PLACES, reason="Triton is compiled here, not interpreted")
def test_padding_keys_of_infinite_weight_in_the_kernel_of_short_sentences(monkeypatch):
    """All scores are far below 0, so the weight of a padding key, whose score is 0, would overflow."""
    short_tiles(monkeypatch, (16,))
    batch = Batch("lengths", [5, 3], 7, dtype=torch.float32)
    batch.q, batch.k = batch.q.abs() + 5, -batch.k.abs() - 5
    for x, y in zip(batch.run(False, "triton", scale=1.0), batch.run(False, "reference", scale=1.0), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(INTERPRETED not in PLACES, reason="Triton is compiled here, not interpreted")
@pytest.mark.parametrize("compiled", [False, True])
def test_triton_follows_torch_s_setting_of_tf32(compiled, monkeypatch):
    """Under either of its names, at each launch; only in float32, and only where there are tiles for TF32."""
    from raoe_kernels.attention import triton_kernels

    matmul, precisions, launches = torch.backends.cuda.matmul, [], list(triton_kernels.KERNELS)

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                precisions.append((options["PRECISION"], options["BLOCK"]))
                return self.kernel[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(triton_kernels, "KERNELS", tuple(map(Recorder, launches)))
    attend = bidirectional_attention
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")

    def launched(dtype=torch.float32, d=16):
        precisions.clear()
        q = torch.randn(1, 1, 5, d, dtype=dtype, requires_grad=True)
        attend(q, q, q, backend="triton").sum().backward()
        assert len(precisions) == 3
        return set(precisions)

    try:
        assert launched() == {("ieee", 32)}
        matmul.allow_tf32 = True
        assert launched() == {("tf32", 64)}
        assert launched(d=65) == {("ieee", 16), ("ieee", 32)}
        assert {precision for precision, _ in (*launched(torch.float64), *launched(torch.bfloat16))} == {"ieee"}
        matmul.fp32_precision = "ieee"
        assert launched() == {("ieee", 32)}
        matmul.fp32_precision = "tf32"
        assert launched() == {("tf32", 64)}
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = "none"


@EVERY_WAY
@pytest.mark.parametrize("d", [1, 16, 33, 80])
@pytest.mark.parametrize("form", ["lengths", "left", "holes", "packed"])
def test_several_tiles(form, d, way, place, poisoned):
    """Lengths on both sides of the edges of tiles of 64 (and of the smaller ones of the wider dtypes)."""
    options = dict(lengths=[63, 129, 65, 17], longest=130, heads=(2, 1), d=d, dtype=torch.float32)
    agrees_with_the_reference(form, options, way, place)


@pytest.mark.parametrize("way", ["dual", "causal-dropout"])
@pytest.mark.parametrize("d, form", [(64, "packed"), (64, "holes"), (128, "left"), (256, "lengths")])
def test_tiles_of_half_precision(d, form, way, place, poisoned):
    """Their tiles are larger, and of the kernel of keys longer than they are wide."""
    device, backend = place
    if backend == "triton" and d > 128:
        from raoe_kernels.triton_rows import has_99_kib

        if has_99_kib(torch.device(device)):
            pytest.skip("refused on GPUs with 99 KiB of shared memory for a block")
    options = dict(lengths=[65, 129, 17], longest=130, heads=(1, 1), d=d, dtype=torch.bfloat16)
    agrees_with_the_reference(form, options, way, place)


@pytest.mark.parametrize("way", ["bidirectional", "dual", "causal"])
@pytest.mark.parametrize("form", ["lengths", "left", "packed"])
def test_runs_of_like_length(form, way, place, monkeypatch):
    """scan on a CPU takes sentences together whose padding costs little: one run of all, some, one each; by kernels, by
    products, or by both."""
    (device, backend), (dual, extra) = place, WAYS[way]
    options = dict(lengths=[9, 9, 30, 1, 31, 9, 0, 30], longest=31, heads=(4, 2), d=20, rubbish=7.0, device=device)
    expected = Batch(form, **options).run(dual, "reference", **extra)
    for short, waste in product((0, 16, 32), (0, 1 << 15, 1 << 40)) if backend == "scan" else [(32, 0)]:
        monkeypatch.setattr(sentences, "SHORT", short)
        monkeypatch.setattr(sentences, "WASTE", waste)
        for x, y in zip(Batch(form, **options).run(dual, backend, **extra), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@OPS
@pytest.mark.parametrize("scale", [0.7, 0.0, -0.7])
def test_is_torch_s_attention_sentence_by_sentence(dual, place, scale):
    """Each sentence alone through torch, unpadded: independent of this package's masks and packing."""
    device, backend = place
    batch = Batch("packed", [5, 3, 0, 9], 12, heads=(6, 2), d=12, device=device)
    results = batch.run(dual, backend, scale=scale)[: 1 + dual]
    results += [] if dual else batch.run(dual, backend, scale=scale, causal=True)[:1]
    for result, causal in zip(results, (True, False) if dual else (False, True), strict=True):
        expected = []
        for q, k, v in zip(*(x.split(batch.lengths) for x in (batch.q, batch.k, batch.v)), strict=True):
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            k, v = k[[0, 0, 0, 1, 1, 1]], v[[0, 0, 0, 1, 1, 1]]
            expected.append(F.scaled_dot_product_attention(scale * q, k, v, is_causal=causal, scale=1).transpose(0, 1))
        torch.testing.assert_close(result.cpu(), torch.cat(expected), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("part", [0, 1])
def test_the_gradient_of_one_part(part, place):
    device, backend = place
    batch = Batch("holes", LENGTHS, 7, device=device)
    inputs = [x.to(device).requires_grad_() for x in (batch.q, batch.k, batch.v)]
    where = batch.where["padding_mask"].to(device)
    grads = torch.autograd.grad(
        dual_attention(*inputs, padding_mask=where, backend=backend)[part], inputs, batch.upstream[0].to(device)
    )
    batch.upstream = [batch.upstream[0].nan_to_num() * (i == part) for i in range(2)]
    for x, y in zip(grads, batch.run(True, "reference")[2:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@OPS
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 0, 3, 4)], ids=lambda s: "x".join(map(str, s)))
def test_empty(shape, dual, place):
    device, backend = place
    inputs = [torch.zeros(shape, device=device, requires_grad=True) for _ in range(3)]
    if shape[1] == 0:
        inputs[1:] = [torch.zeros(2, 1, 3, 4, device=device, requires_grad=True) for _ in range(2)]
    results = (dual_attention if dual else bidirectional_attention)(*inputs, backend=backend)
    for x in results if dual else (results,):
        assert x.shape == shape
    sum(x.sum() for x in (results if dual else (results,))).backward()
    assert all(x.grad is not None and x.grad.eq(0).all() for x in inputs)


@OPS
@pytest.mark.parametrize("ends, longest", [([0], 0), ([0, 0, 0], 0), ([0, 0], 3), ([1, 3, 3], 2)])
def test_packed_tokens_of_no_sequence_are_padding(ends, longest, dual, place, poisoned):
    device, backend = place
    inputs = [torch.full((5, 2, 4), torch.nan, device=device) for _ in range(3)]
    for x in inputs:
        x[ends[0] : ends[-1]] = 1.5
        x.requires_grad_()
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    op = dual_attention if dual else bidirectional_attention
    results = op(*inputs, cu_seqlens=cu_seqlens, max_seqlen=longest, backend=backend)
    results = results if dual else (results,)
    for x in (*results, *torch.autograd.grad(results, inputs, [torch.full_like(x, 2.0) for x in results])):
        inside = torch.arange(5, device=device).ge(ends[0]) & torch.arange(5, device=device).lt(ends[-1])
        assert x[~inside].eq(0).all() and x[inside].isfinite().all()
    assert results[0][ends[0] : ends[-1]].eq(1.5).all()


@OPS
def test_nan_in_a_real_token_stays_in_its_sentence(dual, place):
    device, backend = place
    batch = Batch("lengths", [3, 4], 5, dtype=torch.float32, device=device)
    batch.k[0, :, 1] = torch.nan
    for x in batch.run(dual, backend)[1 + dual - 1 :]:
        x = batch.tokens(x).split([3, 4])
        assert x[0].isnan().any()
        assert x[1].isfinite().all()


@OPS
def test_large_scores_do_not_overflow(dual, place):
    device, backend = place
    batch = Batch("left", LENGTHS, 7, dtype=torch.float32, device=device)
    batch.q, batch.k = batch.q * 300, batch.k * 300
    truth = Batch("left", LENGTHS, 7)
    truth.q, truth.k, truth.v = batch.q.double(), batch.k.double(), batch.v.double()
    ours = batch.run(dual, backend)[: 1 + dual]
    for x, t in zip(ours, truth.run(dual, "reference"), strict=False):
        torch.testing.assert_close(x.cpu().double(), t, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["dual", "causal-dropout"])
@pytest.mark.parametrize("form", ["lengths", "packed"])
def test_under_gradient_checkpointing(form, way, place):
    """Forward runs again, with the same mask of dropout."""
    (device, backend), (dual, extra) = place, WAYS[way]
    batch = Batch(form, [3, 4], 5, dtype=torch.float32, device=device)
    expected = batch.run(dual, backend, **extra)[1 + dual :]
    inputs = [x.to(device).requires_grad_() for x in (batch.q, batch.k, batch.v)]
    where = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.where.items()}
    op = dual_attention if dual else bidirectional_attention
    torch.manual_seed(11)  # as Batch.run
    results = checkpoint(lambda *x: op(*x, **where, **extra, backend=backend), *inputs, use_reentrant=False)
    results = results if dual else (results,)
    upstream = [x.to(device) for x in batch.upstream[: len(results)]]
    for x, y in zip(torch.autograd.grad(results, inputs, upstream), expected, strict=True):
        assert torch.equal(x, y)


@OPS
def test_autocast_computes_in_its_dtype_as_torch_s_attention_does(dual, place):
    device, backend = place
    batch = Batch("lengths", LENGTHS, 7, dtype=torch.float32, device=device)
    half = Batch("lengths", LENGTHS, 7, dtype=torch.bfloat16, device=device)
    expected = half.run(dual, backend)
    op = dual_attention if dual else bidirectional_attention
    lengths = batch.where["lengths"].to(device)
    inputs = [x.to(device).requires_grad_() for x in (batch.q, batch.k, batch.v.bfloat16())]
    with torch.autocast(device, dtype=torch.bfloat16):
        results = op(*inputs, lengths=lengths, backend=backend)
        wide = op(*(x.detach().double() for x in inputs), lengths=lengths, backend=backend)
    results, wide = (results, wide[0]) if dual else ((results,), wide)
    grads = torch.autograd.grad(results, inputs, [x.to(device) for x in half.upstream[: len(results)]])
    for x, y in zip((*results, *grads), expected, strict=True):
        assert torch.equal(x, y.to(x.dtype))
    assert results[0].dtype == torch.bfloat16 and wide.dtype == torch.float64


def test_triton_refuses_wide_heads_where_a_block_has_little_shared_memory(monkeypatch):
    device = PLACES[-1][0]
    monkeypatch.setattr("raoe_kernels.attention.triton_kernels.has_99_kib", lambda device: True)
    for d in (128, 129):
        q = torch.randn(1, 1, 3, d, device=device)
        message = r"129 on this GPU: .* limit the head dimension to 128; use backend='scan'"
        refusal = pytest.raises(RuntimeError, match=message)
        with refusal if d > 128 else nullcontext():
            assert bidirectional_attention(q, q, q, backend="triton").shape == q.shape
