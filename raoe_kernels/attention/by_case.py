"""Backend "auto" on CUDA: the Triton kernels, or torch's own attention if it should be at least as fast (README)."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import scan, triton_kernels
from .padding import Padding

LONG = 512  # most tokens of a batch without padding that still uses the Triton kernels
WIDE = 128  # largest head dimension for which the Triton kernels keep their accumulators in registers


def serving(q: Tensor, padding: Padding) -> ModuleType:
    """Return the module that runs the call."""
    if q.shape[-1] > WIDE:
        return scan
    unpadded = padding.cu_seqlens is None and padding.lengths is None and padding.mask is None
    half = q.dtype in (torch.float16, torch.bfloat16)
    return scan if unpadded and half and padding.longest > LONG else triton_kernels
