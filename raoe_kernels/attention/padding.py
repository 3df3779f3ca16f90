"""Which tokens are real, in plain torch: padded and packed batches brought to one form, without a host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """Where the real tokens of a call are; at most one of the three tensors is given, without any all are real.

    lengths     [b]: the first lengths[i] tokens of row i are real
    mask        [b, L] bool: True where a token is real
    cu_seqlens  [b + 1] int32: tokens cu_seqlens[i] to cu_seqlens[i + 1] of a packed batch are sequence i
    longest     L of a padded batch, max_seqlen of a packed one
    spans       what a backend made of the others for itself, once a call
    """

    lengths: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    longest: int
    spans: Tensor | None = None


class Padded(NamedTuple):
    """A batch in padded form, zeros where `real` [b, L] is False (None: all real).

    right: known to be right padding
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None
    right: bool


def real_tokens(padding: Padding, device: torch.device) -> Tensor | None:
    """[b, L] bool of a padded batch, None where nothing says that some are not."""
    if padding.lengths is None:
        return padding.mask
    return torch.arange(padding.longest, device=device) < padding.lengths[:, None]


def pad(q: Tensor, k: Tensor, v: Tensor, padding: Padding) -> Padded:
    """[b, heads, L, d] of each, padding zeroed: whatever stood there, NaN too, is gone, and gets gradient 0."""
    if padding.cu_seqlens is not None:
        place = torch.arange(padding.longest, device=q.device)
        first = padding.cu_seqlens[:-1].long()
        real = place < padding.cu_seqlens.diff()[:, None]
        token = torch.where(real, first[:, None] + place, 0)
        q, k, v = (x[token].transpose(1, 2) for x in (q, k, v))
    else:
        found = real_tokens(padding, q.device)
        if found is None:
            return Padded(q, k, v, None, True)
        real = found
    empty = ~real[:, None, :, None]
    q, k, v = (x.masked_fill(empty, 0) for x in (q, k, v))
    return Padded(q, k, v, real, padding.mask is None)


def unpad(out: Tensor, real: Tensor | None, padding: Padding, tokens: int) -> Tensor:
    """The result [b, heads, L, d] in the form of the call, zeros where there was no real token."""
    if padding.cu_seqlens is None:
        return out if real is None else out.masked_fill(~real[:, None, :, None], 0)
    token = torch.arange(tokens, device=out.device)
    sequence = torch.searchsorted(padding.cu_seqlens[1:], token, right=True).clamp(max=out.shape[0] - 1)
    place = token - padding.cu_seqlens[sequence]
    inside = (place >= 0) & (place < padding.cu_seqlens.diff().clamp(max=padding.longest)[sequence])
    out = out[sequence, :, torch.where(inside, place, 0)]
    return out.masked_fill(~inside[:, None, None], 0)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The result of a batch without sequences or with sequences without tokens: zeros, and zero gradients."""
    everywhere = torch.ones((), dtype=torch.bool, device=q.device)
    rest = k.masked_fill(everywhere, 0).sum() + v.masked_fill(everywhere, 0).sum()
    return q.masked_fill(everywhere, 0) + rest
