"""Bidirectional and dual attention with torch's own functions: scaled_dot_product_attention, varlen_attn for packed
batches if it supports them, and on a CPU the kernels behind scaled_dot_product_attention in runs of sentences.

A dual call computes two attentions, because torch has no function that returns both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .padding import Padding, pad, unpad
from .sentences import Sentences, supports


def forward(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool) -> tuple[Tensor, ...]:
    tokens = q.shape[0]
    with torch.autocast(q.device.type, enabled=False):
        # Repeat the heads here instead of passing enable_gqa: with enable_gqa and a mask torch uses
        # the kernel that stores L x L scores, and before torch 2.13 on a CPU even without a mask.
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if not dual and takes_packed(q, padding):
            return (_packed(q, k, v, padding.cu_seqlens, padding.longest, scale),)
        if q.device.type == "cpu" and supports(padding):
            no_grad = not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
            return Sentences.apply(q, k, v, padding, scale, dual, no_grad)
        q, k, v, real, right = pad(q, k, v, padding)
        results = []
        if dual:
            # With right padding, every key up to a real query is real, so no mask is needed.
            mask = None if right or real is None else _causal(real)
            causal = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
            results.append(unpad(causal, real, padding, tokens))
        # A row without a real key attends to all keys, which are zeros.
        mask = None if real is None else (real | ~real.any(1, keepdim=True))[:, None, None, :]
        full = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        results.append(unpad(full, real, padding, tokens))
    return tuple(results)


def takes_packed(q: Tensor, padding: Padding) -> bool:
    """Whether torch's varlen_attn (FlashAttention on packed sentences) can run: torch 2.10, half precision, sm_80."""
    return (
        padding.cu_seqlens is not None
        and q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and _has_flash(q.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    is_new_enough = torch.__version__ >= "2.10"  # compared as versions; in 2.9 varlen_attn has no scale argument
    return is_new_enough and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _packed(q: Tensor, k: Tensor, v: Tensor, ends: Any, longest: int, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # varlen_attn does not write the rows of tokens outside all sequences, neither in results nor in gradients.
    token = torch.arange(q.shape[0], device=q.device)
    outside = ((token < ends[0]) | (token >= ends[-1]))[:, None, None]
    q, k, v = (x.masked_fill(outside, 0).contiguous() for x in (q, k, v))
    out: Any = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale)
    return out.masked_fill(outside, 0)


def _causal(real: Tensor) -> Tensor:
    """Mask [b, 1, L, L]: the real keys up to the query, and the query's own key, so that no row is empty."""
    length = real.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=real.device)
    return ((before & real[:, None, :]) | own)[:, None]
