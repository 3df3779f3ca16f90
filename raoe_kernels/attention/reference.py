"""Reference implementation of bidirectional and dual attention for any dtype and device, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import wide
from .padding import Padding, pad, unpad


def forward(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool) -> tuple[Tensor, ...]:
    """Return (bidirectional,) or (causal, bidirectional): softmax(scale q k^T) v over all or earlier real keys."""
    tokens, dtype = q.shape[0], q.dtype
    with torch.autocast(q.device.type, enabled=False):
        exact = wide(dtype)
        q, k, v, real, _ = pad(q.to(exact), k.to(exact), v.to(exact), padding)
        heads, length = q.shape[1:3]
        k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
        if real is None:
            real = torch.ones(q.shape[0], length, dtype=torch.bool, device=q.device)
        both = real[:, None, :] & real[:, :, None]
        before = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        results = []
        for allowed in (both & before, both) if dual else (both,):
            # A padding query would have no key. Let it attend to every key; its row is zeroed afterwards.
            allowed = allowed | ~real[:, :, None]
            scores = (q @ k.transpose(2, 3) * scale).masked_fill(~allowed[:, None], -torch.inf)
            results.append(unpad(scores.softmax(-1) @ v, real, padding, tokens).to(dtype))
    return tuple(results)
