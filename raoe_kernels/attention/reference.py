"""Reference implementation of bidirectional, causal and dual attention for any dtype and device, differentiated by
autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import wide, without_autocast
from .padding import Options, Padding, pad, unpad

LOW_BITS = 0xFFFFFFFF


def forward(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options) -> tuple[Tensor, ...]:
    """Return dropout(softmax(scale q k^T)) v over the real keys. In a causal result, each query attends only to the
    keys up to its own position."""
    tokens, dtype = q.shape[0], q.dtype
    with without_autocast(q):
        exact = wide(dtype)
        q, k, v, real, _ = pad(q.to(exact), k.to(exact), v.to(exact), padding)
        heads, length = q.shape[1:3]
        k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
        if real is None:
            real = torch.ones(q.shape[0], length, dtype=torch.bool, device=q.device)
        both = real[:, None, :] & real[:, :, None]
        before = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        results = []
        for causal in options.causal:
            # The softmax of a query without a real key is NaN. So padding queries attend to all keys, and unpad sets
            # their results to 0.
            allowed = (both & before if causal else both) | ~real[:, :, None]
            scores = (q @ k.transpose(2, 3) * options.scale).masked_fill(~allowed[:, None], -torch.inf)
            weights = scores.softmax(-1)
            if options.seed is not None:
                dropped = ~kept(options.seed, options.dropout_p, real, heads)
                weights = weights.masked_fill(dropped, 0) / (1 - options.dropout_p)
            results.append(unpad(weights @ v, real, padding, tokens).to(dtype))
    return tuple(results)


def kept(seed: Tensor, p: float, real: Tensor, heads: int) -> Tensor:
    """Return a bool mask [b, heads, L, L], True for the attention weights that dropout keeps (see the README)."""
    place = torch.arange(real.shape[1], device=real.device) - real.byte().argmax(1, keepdim=True)
    batch, head = (torch.arange(n, device=real.device) for n in (real.shape[0], heads))
    key = _fold(_fold(torch.zeros_like(seed), seed), seed >> 32)
    query_keys = _fold(_fold(_fold(key, head), batch[:, None])[..., None], place[:, None])
    return _fold(query_keys[..., None], place[:, None, None]) >= int(p * 2**32)


def _fold(key: Tensor, number: Tensor) -> Tensor:
    """Hash the low 32 bits of `number` into `key` (a 32-bit value stored as int64) with lowbias32. If one of the two
    arguments is fixed, the result is a one-to-one function of the other."""
    x = key ^ (number * 0x9E3779B9 & LOW_BITS)
    x = (x ^ x >> 16) * 0x7FEB352D & LOW_BITS
    x = (x ^ x >> 15) * 0x846CA68B & LOW_BITS
    return x ^ x >> 16
