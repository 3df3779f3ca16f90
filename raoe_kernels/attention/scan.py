"""Bidirectional and dual attention by torch's own scaled_dot_product_attention, which differentiates itself.

A dual call is two of them: torch has no attention that gives both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .padding import Padding, pad, unpad


def forward(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool) -> tuple[Tensor, ...]:
    tokens = q.shape[0]
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, real, right = pad(q, k, v, padding)
        # Heads are repeated here and not by enable_gqa: with it torch's kernels that take a mask, and all on the CPU
        # before 2.13, give way to the one that stores L x L scores.
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        results = []
        if dual:
            # With right padding the keys up to a real query are real.
            mask = None if right or real is None else _causal(real)
            causal = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
            results.append(unpad(causal, real, padding, tokens))
        # A row without any key sees all of them, which are zeros.
        mask = None if real is None else (real | ~real.any(1, keepdim=True))[:, None, None, :]
        full = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        results.append(unpad(full, real, padding, tokens))
    return tuple(results)


def _causal(real: Tensor) -> Tensor:
    """[b, 1, L, L]: the real keys up to the query, and the query's own so that no row is without a key."""
    length = real.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=real.device)
    return ((before & real[:, None, :]) | own)[:, None]
