"""Attention with torch's own functions and torch's dropout. Packed sentences use FlashAttention where it can run. On a
CPU without dropout, most batches with padding use the class Sentences, which calls torch's CPU kernels. All other calls
use scaled_dot_product_attention. A dual call computes attention twice, because torch has no dual attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .._dispatch import refuse_second_derivative
from .._dtypes import without_autocast
from .padding import Options, Padding, pad, unpad
from .sentences import Sentences, supports

_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


def forward(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options) -> tuple[Tensor, ...]:
    tokens, scale, dropout_p = q.shape[0], options.scale, options.dropout_p
    with without_autocast(q):
        if len(options.causal) == 1 and takes_packed(q, padding):  # FlashAttention supports grouped heads
            return (_Packed.apply(q, k, v, padding.cu_seqlens, padding.longest, options),)
        # Repeat the heads instead of passing enable_gqa: with enable_gqa and a mask, torch chooses a kernel that stores
        # L x L scores. Before version 2.13, torch does so on a CPU even without a mask.
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        # The CPU kernels that Sentences calls have no dropout.
        if q.device.type == "cpu" and not dropout_p and supports(padding):
            no_grad = not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
            return Sentences.apply(q, k, v, padding, scale, options.causal, no_grad)
        q, k, v, real, right = pad(q, k, v, padding)
        results = []
        for causal in options.causal:
            if causal:
                # With right padding, every key up to a real query is real, so no mask is needed.
                mask = None if right or real is None else _causal(real)
            else:
                # In a row without a real key, queries attend to all keys, which are zeros.
                mask = None if real is None else (real | ~real.any(1, keepdim=True))[:, None, None, :]
            is_causal = causal and mask is None
            out = scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale)
            results.append(unpad(out, real, padding, tokens))
    return tuple(results)


def takes_packed(q: Tensor, padding: Padding) -> bool:
    """Return whether FlashAttention can run. FlashAttention needs a packed batch, half precision, a head dimension
    divisible by 8, and a GPU with compute capability 8.0 or higher."""
    return (
        padding.cu_seqlens is not None
        and q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and _has_flash(q.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


class _Packed(torch.autograd.Function):
    """Torch's FlashAttention on packed sentences. FlashAttention does not access tokens that belong to no sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, options: Options):
        q, k, v = (x.contiguous() for x in (q, k, v))
        numbers = ends, ends, longest, longest, options.dropout_p, options.causal[0]
        out, lse, *random, _ = _flash_forward(q, k, v, *numbers, False, scale=options.scale)
        token = torch.arange(q.shape[0], device=q.device)
        outside = ((token < ends[0]) | (token >= ends[-1]))[:, None, None]
        out.masked_fill_(outside, 0)
        ctx.save_for_backward(q, k, v, out, lse, outside, ends, *random)
        ctx.longest, ctx.options = longest, options._replace(seed=None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        refuse_second_derivative("attention")
        *tensors, outside, ends, random, unused = ctx.saved_tensors
        options = ctx.options
        numbers = ends, ends, ctx.longest, ctx.longest, options.dropout_p, options.causal[0]
        grads = _flash_backward(grad.contiguous(), *tensors, *numbers, random, unused, scale=options.scale)
        return *(x.masked_fill_(outside, 0) for x in grads), None, None, None


def _causal(real: Tensor) -> Tensor:
    """Return a mask [b, 1, L, L], True where a query may attend to a key: to the real keys before the query, and to the
    query's own key, so that no row of the mask is empty."""
    length = real.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=real.device)
    return ((before & real[:, None, :]) | own)[:, None]
