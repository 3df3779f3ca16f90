"""bidirectional_attention and dual_attention on right-padded batches, forward + backward, against torch's own.

Lengths are uniform between a twelfth of the longest and the longest (5 to 60 at 64, as NLI sentences are). "SDPA twice"
is what dual_attention replaces: one causal and one full call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.case import Call, Case, ours
from raoe_kernels import bidirectional_attention, dual_attention

SIZES = {"cpu": [64, 512], "cuda": [64, 512, 2048, 8192]}
# (tokens of a batch with its padding, heads, head dimension)
SHAPE = {"cpu": (2048, 4, 32), "cuda": (32768, 32, 128)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TESTS = ["tests/kernels/test_attention.py", "tests/kernels/test_attention_calls.py"]


def drawn(length: int, device: str) -> torch.Tensor:
    """The lengths of a batch."""
    batch = max(1, SHAPE[device][0] // length)
    return torch.randint(max(1, length // 12), length + 1, (batch,), generator=torch.Generator().manual_seed(length))


def least(length: int, device: str) -> tuple[int, int]:
    """Bytes and FLOPs: q, k, v, two results and their gradients in, three gradients out; two products forward, five
    backward, of each real query with each real key."""
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

    def step(attention: Callable[[], tuple[torch.Tensor, ...]]) -> Call:
        def call(i: int) -> None:
            q.grad = k.grad = v.grad = None
            results = attention()
            torch.autograd.backward(results, [upstream] * len(results))

        return call

    def sdpa(which: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=which)

    result: dict[str, Call] = {}
    for name in ours("dual_attention", device):
        options = {"lengths": lengths, "backend": name}
        result[f"dual {name}"] = step(lambda o=options: dual_attention(q, k, v, **o))
        result[f"bidirectional {name}"] = step(lambda o=options: (bidirectional_attention(q, k, v, **o),))
    result["SDPA twice, masks"] = step(lambda: (sdpa(causal), sdpa(mask)))
    result["SDPA, mask"] = step(lambda: (sdpa(mask),))
    compiled = torch.compile(dual_attention, dynamic=False)
    result["dual scan, compiled"] = step(lambda: compiled(q, k, v, lengths=lengths, backend="scan"))
    missing = {}
    if device == "cuda":
        result["flex_attention, compiled"] = step(_flex(q, k, v, lengths))
    else:
        missing["flex_attention, compiled"] = "has no backward on a CPU"
    return Case(
        f"{batch} x {heads} heads, lengths to {length}, width {width}",
        result,
        *least(length, device),
        missing,
    )


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, _, length, _ = q.shape
    block = create_block_mask(
        lambda b, h, row, column: column < lengths[b], batch, None, length, length, device=q.device.type
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: (compiled(q, k, v, block_mask=block),)
