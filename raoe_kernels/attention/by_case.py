"""What auto runs on CUDA: Triton's kernels, but torch's own attention where that should be no slower (README)."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import scan, triton_kernels
from .padding import Padding

LONG = 512  # tokens up to which a sentence without padding is Triton's, too
WIDE = 128  # columns from which ours do not keep their accumulators in registers


def serving(q: Tensor, padding: Padding) -> ModuleType:
    """The module that serves a call."""
    if q.shape[-1] > WIDE:
        return scan
    unpadded = padding.cu_seqlens is None and padding.lengths is None and padding.mask is None
    half = q.dtype in (torch.float16, torch.bfloat16)
    return scan if unpadded and half and padding.longest > LONG else triton_kernels
