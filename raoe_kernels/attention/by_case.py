"""Backend "auto" on CUDA: the Triton kernels, or torch's own attention if it should be at least as fast (README)."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import scan, triton_kernels
from .padding import Options, Padding

LONG = 512  # most tokens of a sentence for which the Triton kernels are used even where FlashAttention can run
WIDE = 128  # largest head dimension for which the Triton kernels keep their accumulators in registers


def serving(q: Tensor, padding: Padding, options: Options, operator: bool) -> ModuleType:
    """Return the module that runs the call. The backward pass of the operator would run scan's forward pass again: of
    packed sentences that costs more than FlashAttention gains, and dropout would need the weights in memory."""
    if operator and options.dropout_p:
        return triton_kernels
    if q.shape[-1] > WIDE:
        return scan
    unpadded = padding.cu_seqlens is None and padding.lengths is None and padding.mask is None
    half = q.dtype in (torch.float16, torch.bfloat16)
    packed = not operator and len(options.causal) == 1 and scan.takes_packed(q, padding)
    return scan if padding.longest > LONG and (packed or (unpadded and half)) else triton_kernels
