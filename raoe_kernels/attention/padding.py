"""Padding and options of an attention call, and functions that convert packed batches to padded batches and back. No
function in this file makes the host wait for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """Positions of the real tokens (tokens that are not padding) in a batch. At most one of lengths, mask and
    cu_seqlens is set. If none of these is set, all tokens are real.

    Attributes:
        lengths: [b]; the first lengths[i] tokens of row i are real
        mask: [b, L] bool, True where a token is real
        cu_seqlens: [b + 1] int32; sequence i of a packed batch holds tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1
        longest: L for a padded batch, max_seqlen for a packed batch
        spans: positions of the real tokens in the form that a backend needs, computed once per call
    """

    lengths: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    longest: int
    spans: Tensor | None = None


class Options(NamedTuple):
    """Settings of a call to an attention function.

    Attributes:
        scale: factor for the attention scores q k^T
        causal: whether each result is causal: (False,) or (True,), or (True, False) in a dual call
        dropout_p: probability that an attention weight is dropped, 0 in a dual call
        seed: scalar int64 tensor from which `reference` and `triton` compute the dropout mask; None without dropout
    """

    scale: float
    causal: tuple[bool, ...]
    dropout_p: float = 0.0
    seed: Tensor | None = None


class Padded(NamedTuple):
    """A batch in padded form, with zeros where the mask `real` [b, L] is False. If `real` is None, all tokens are real.

    `right` is True if all padding is known to be on the right.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None
    right: bool


def real_tokens(padding: Padding, device: torch.device) -> Tensor | None:
    """Return a bool mask [b, L], True for the real tokens of a padded batch, or None if all tokens are real."""
    if padding.lengths is None:
        return padding.mask
    return torch.arange(padding.longest, device=device) < padding.lengths[:, None]


def pad(q: Tensor, k: Tensor, v: Tensor, padding: Padding) -> Padded:
    """Convert q, k and v to [b, heads, L, d]. Set the padding to 0, so that NaNs in the padding do not propagate and
    the padding's gradient is 0."""
    if padding.cu_seqlens is not None:
        place = torch.arange(padding.longest, device=q.device)
        first = padding.cu_seqlens[:-1].long()
        real = place < padding.cu_seqlens.diff()[:, None]
        token = torch.where(real, first[:, None] + place, 0)
        q, k, v = (x[token].transpose(1, 2) for x in (q, k, v))
    else:
        mask = real_tokens(padding, q.device)
        if mask is None:
            return Padded(q, k, v, None, True)
        real = mask
    is_padding = ~real[:, None, :, None]
    q, k, v = (x.masked_fill(is_padding, 0) for x in (q, k, v))
    return Padded(q, k, v, real, padding.mask is None)


def unpad(out: Tensor, real: Tensor | None, padding: Padding, tokens: int) -> Tensor:
    """Convert a result [b, heads, L, d] to the form (padded or packed) of the call's inputs, with zeros for padding."""
    if padding.cu_seqlens is None:
        return out if real is None else out.masked_fill(~real[:, None, :, None], 0)
    token = torch.arange(tokens, device=out.device)
    sequence = torch.searchsorted(padding.cu_seqlens[1:], token, right=True).clamp(max=out.shape[0] - 1)
    place = token - padding.cu_seqlens[sequence]
    is_real = (place >= 0) & (place < padding.cu_seqlens.diff().clamp(max=padding.longest)[sequence])
    out = out[sequence, :, torch.where(is_real, place, 0)]
    return out.masked_fill(~is_real[:, None, None], 0)


def zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the result of a batch without sequences or without tokens: zeros, with zero gradients."""
    all_elements = torch.ones((), dtype=torch.bool, device=q.device)
    rest = k.masked_fill(all_elements, 0).sum() + v.masked_fill(all_elements, 0).sum()
    return q.masked_fill(all_elements, 0) + rest
