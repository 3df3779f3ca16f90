"""Dropout of attention weights: the distribution of its masks, and that forward and backward have the same.
And calls of torch's FlashAttention, which needs a GPU to run."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from raoe_kernels import bidirectional_attention
from raoe_kernels.attention import scan
from raoe_kernels.attention.padding import Options
from raoe_kernels.attention.reference import kept
from tests.kernels.attention_cases import Batch
from tests.kernels.conftest import PLACES

OUR_PLACES = [pytest.param(p, id="-".join(p)) for p in PLACES if p[1] != "native"]
EVERY_PLACE = pytest.mark.parametrize("place", OUR_PLACES)


def masks(place, p=0.3, seed=0, count=3, heads=2, length=64, form="padded", causal=False, dtype=torch.float32):
    """[sentences, heads, queries, keys], 1 where a weight was kept: of equal weights and values that are unit vectors.
    And the same from the gradient of the values."""
    device, backend = place
    q = torch.zeros(count, heads, length, length, dtype=dtype, device=device)
    v = torch.eye(length, dtype=dtype, device=device).expand_as(q).contiguous().requires_grad_()
    upstream = torch.eye(length, dtype=dtype, device=device).expand_as(q)
    where = {}
    if form == "packed":
        q, values, upstream = (x.transpose(1, 2).flatten(0, 1) for x in (q, v, upstream))
        ends = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)
        where = {"cu_seqlens": ends, "max_seqlen": length}
    else:
        values = v
    torch.manual_seed(seed)
    out = bidirectional_attention(q, q, values, **where, dropout_p=p, causal=causal, backend=backend)
    (grad,) = torch.autograd.grad(out, v, upstream)
    if form == "packed":
        out = out.unflatten(0, (count, length)).transpose(1, 2)
    keys = torch.arange(1, length + 1, device=device)[:, None] if causal else length
    kept, again = (x.detach().float() * keys * (1 - p) for x in (out, grad.mT))
    return kept.cpu(), again.cpu()


@EVERY_PLACE
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_forward_and_backward_drop_the_same(form, causal, place):
    for p in (0.1, 0.5, 0.9):
        kept, again = masks(place, p, form=form, causal=causal)
        torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-5)
        torch.testing.assert_close(again, kept, rtol=0, atol=1e-5)
        assert set(kept.round().unique().tolist()) == {0, 1}


def fold(key: int, number: int) -> int:
    x = key ^ (number * 0x9E3779B9) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("seed", [0, 5, 2**62 + 12345678901])
def test_masks_by_the_readme_s_formula(seed):
    """In Python's integers, for two sentences of three tokens, the second one after a token of padding."""
    real = torch.tensor([[True, True, True, False], [False, True, True, True]])
    mask = kept(torch.tensor(seed), 0.4, real, 2)
    for sentence, head, i, j in product(range(2), range(2), range(3), range(3)):
        stream = fold(fold(fold(fold(0, seed % 2**32), seed >> 32), head), sentence)
        assert mask[sentence, head, i + sentence, j + sentence] == (fold(fold(stream, i), j) >= int(0.4 * 2**32))


def correlation(x, y):
    """In standard deviations of that of independent numbers."""
    x, y = x.flatten() - x.mean(), y.flatten() - y.mean()
    return float((x @ y) / (x.norm() * y.norm()) * x.numel() ** 0.5)


@pytest.mark.parametrize("place", [p for p in OUR_PLACES if p.values[0] != ("cpu", "triton")])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_independent(p, place):
    """Numbers of kept weights within five standard deviations: of all, of each query and of each key. No correlation of
    neighbours: keys, queries, heads, sentences, seeds, and queries that exchange places with keys. (Triton's masks are
    the reference's: test_attention.py.)"""
    kept = masks(place, p, count=4, heads=4, length=128)[0].round()
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):
        count = torch.tensor([kept.shape[d] for d in dims]).prod()
        assert ((kept.mean(dims) - (1 - p)).abs() < 5 * (p * (1 - p) / count) ** 0.5).all(), dims
    other = masks(place, p, seed=1, count=4, heads=4, length=128)[0].round()
    pairs = [(kept.narrow(d, 0, kept.shape[d] - 1), kept.narrow(d, 1, kept.shape[d] - 1)) for d in range(4)]
    diagonal = (kept[..., :-1, :-1], kept[..., 1:, 1:])
    pairs += [diagonal, (kept, other), (kept, kept.mT.contiguous()), (kept[:, :-1, 1:], kept[:, 1:, :-1])]
    assert [abs(correlation(x, y)) < 5 for x, y in pairs] == [True] * len(pairs)
    assert len({tuple(row.tolist()) for row in kept.flatten(0, 2)}) == 4 * 4 * 128  # no two queries have equal masks


@EVERY_PLACE
@pytest.mark.parametrize("form", ["left", "packed"])
def test_compiled(form, place):
    """Forward and backward of the operator drop the same: scan's, too, whose forward pass runs twice there."""
    device, backend = place
    exact = backend if backend == "triton" else "reference"
    batch = Batch(form, [3, 6], 6, heads=(4, 2), dtype=torch.float64, rubbish=0.5, device=device)
    options = {"dropout_p": 0.4, "causal": True}
    inputs = [x.to(device).requires_grad_() for x in (batch.q, batch.k, batch.v)]
    where = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.where.items()}
    torch._dynamo.reset()
    step = torch.compile(bidirectional_attention, fullgraph=True, backend="aot_eager")
    torch.manual_seed(11)  # as Batch.run
    found = step(*inputs, **where, **options, backend=backend)
    grads = torch.autograd.grad(found, inputs, batch.upstream[0].to(device))
    for x, y in zip((found, *grads), batch.run(False, exact, **options), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert not torch.equal(step(*inputs, **where, **options, backend=backend), found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attention_takes_these_arguments(dtype):
    """Its real operators, forward and backward, on tensors without memory."""
    q, k, v = (torch.empty(9, 4, 64, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    result = scan._Packed.apply(q, k, v, ends, 5, Options(0.5, (True,), 0.1))
    assert result.shape == q.shape and result.dtype == dtype
    assert [x.shape for x in torch.autograd.grad(result.sum(), (q, k, v))] == [q.shape] * 3
