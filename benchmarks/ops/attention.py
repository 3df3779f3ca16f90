"""bidirectional_attention and dual_attention, right-padded and packed, forward + backward, against torch's attention.

Lengths are uniform between a twelfth of the longest and the longest (5 to 60 at 64, like NLI sentences). "SDPA twice"
is what dual_attention replaces: one causal and one full call. "as if full" also attends to padding, which gives cuDNN's
time without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from benchmarks.case import Call, Case, ours
from benchmarks.triton_variants import SHORT, short_tiles
from raoe_kernels import bidirectional_attention, dual_attention

SIZES = {"cpu": [8, 32, 64, 128, 512], "cuda": [16, 32, 64, 512, 2048, 8192]}
# (tokens of a batch with its padding, heads, head dimension)
SHAPE = {"cpu": (2048, 4, 32), "cuda": (32768, 32, 128)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TESTS = ["tests/kernels/test_attention.py", "tests/kernels/test_attention_calls.py"]


def drawn(length: int, device: str) -> torch.Tensor:
    """Draw the lengths of a batch."""
    batch = max(1, SHAPE[device][0] // length)
    return torch.randint(max(1, length // 12), length + 1, (batch,), generator=torch.Generator().manual_seed(length))


def least(length: int, device: str) -> tuple[int, int]:
    """Return bytes and FLOPs: q, k, v, two results and their gradients are read, three gradients written; two products
    forward and five backward, of each real query with each real key."""
    lengths, (_, heads, width) = drawn(length, device), SHAPE[device]
    cells = int((lengths**2).sum()) * heads
    return 10 * len(lengths) * length * heads * width * DTYPES[device].itemsize, 14 * cells * width


def case(length: int, device: str) -> Case:
    lengths = drawn(length, device).to(device)
    batch, (_, heads, width) = len(lengths), SHAPE[device]
    seeded = torch.Generator().manual_seed(length)
    dtype = DTYPES[device]
    q, k, v = (
        torch.randn(batch, heads, length, width, generator=seeded).to(device, dtype).requires_grad_() for _ in range(3)
    )
    real = torch.arange(length, device=device) < lengths[:, None]
    mask = real[:, None, None, :]
    causal = mask & torch.ones(length, length, dtype=torch.bool, device=device).tril()
    upstream = torch.randn(batch, heads, length, width, generator=seeded).to(device, dtype) * real[:, None, :, None]

    padded = (q, k, v), upstream
    packed = [x.detach().transpose(1, 2)[real].requires_grad_() for x in padded[0]], upstream.transpose(1, 2)[real]
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()

    def step(attention: Callable[..., tuple[torch.Tensor, ...]], form=padded) -> Call:
        inputs, above = form

        def call(i: int) -> None:
            for x in inputs:
                x.grad = None
            results = attention(*inputs)
            torch.autograd.backward(results, [above] * len(results))

        return call

    def sdpa(q, k, v, which: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=which)

    result: dict[str, Call] = {}
    forms = {"": ({"lengths": lengths}, padded), "packed ": ({"cu_seqlens": ends, "max_seqlen": length}, packed)}
    for name in ours("dual_attention", device):
        for word, (where, form) in forms.items():
            options = where | {"backend": name}
            result[f"dual {word}{name}"] = step(lambda *x, o=options: dual_attention(*x, **o), form)
            result[f"bidirectional {word}{name}"] = step(
                lambda *x, o=options: (bidirectional_attention(*x, **o),), form
            )
            result[f"bidirectional {word}{name}, dropout"] = step(
                lambda *x, o=options: (bidirectional_attention(*x, dropout_p=0.1, **o),), form
            )
    if device == "cuda" and length <= max(SHORT):  # tiles that are off by default, until this row says otherwise
        for name in ("dual packed triton", "bidirectional packed triton", "bidirectional packed triton, dropout"):
            result[f"{name}, short tiles"] = _in_short_tiles(result[name])
    result["SDPA twice, masks"] = step(lambda *x: (sdpa(*x, causal), sdpa(*x, mask)))
    result["SDPA, mask"] = step(lambda *x: (sdpa(*x, mask),))
    compiled = torch.compile(dual_attention, dynamic=False)
    result["dual scan, compiled"] = step(lambda *x: compiled(*x, lengths=lengths, backend="scan"))
    missing = {}
    if device == "cuda":
        result["flex_attention, compiled"] = step(_flex(lengths, length))
        for name, twice in (("cuDNN, as if full", False), ("cuDNN twice, as if full", True)):
            result[name] = step(_cudnn(twice))
        if find_spec("torch.nn.attention.varlen"):
            for name, twice in (("varlen_attn, packed", False), ("varlen_attn twice, packed", True)):
                result[name] = step(_varlen(ends, length, twice), packed)
        else:
            missing["varlen_attn, packed"] = f"torch {torch.__version__} does not have it"
    else:
        missing["flex_attention, compiled"] = "has no backward on a CPU"
        missing |= dict.fromkeys(("cuDNN, as if full", "varlen_attn, packed"), "needs CUDA")
    return Case(
        f"{batch} x {heads} heads, lengths to {length}, width {width}",
        result,
        *least(length, device),
        missing,
    )


def _in_short_tiles(call: Call) -> Call:
    from raoe_kernels.attention import triton_kernels

    def in_short_tiles(i: int) -> None:
        with short_tiles(triton_kernels, *SHORT):
            call(i)

    return in_short_tiles


def _cudnn(twice: bool):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return tuple(F.scaled_dot_product_attention(q, k, v, is_causal=way) for way in (True, False)[1 - twice :])

    return attention


def _varlen(ends: torch.Tensor, longest: int, twice: bool):
    from torch.nn.attention.varlen import varlen_attn

    def attention(q, k, v):
        windows = ((-1, 0), (-1, -1))[1 - twice :]
        return tuple(varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window) for window in windows)

    return attention


def _flex(lengths: torch.Tensor, longest: int):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block = create_block_mask(
        lambda b, h, row, column: column < lengths[b], len(lengths), None, longest, longest, device=lengths.device.type
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: (compiled(q, k, v, block_mask=block),)
