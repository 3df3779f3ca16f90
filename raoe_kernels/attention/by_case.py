"""What auto runs on CUDA: Triton's kernels, but torch's own attention in the cases where that should be no slower.

No GPU has been asked yet: the cases follow from tiles, products and spills, see the README.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import scan, triton_kernels
from .padding import Padding

# Sentences from which torch's tiles of 128 rows are as full as ours of 64, so that its 5 products in backward count.
LONG = 512
WIDE = 128  # columns from which ours do not keep their accumulators in registers


def serving(q: Tensor, k: Tensor, padding: Padding, dual: bool) -> ModuleType:
    """The module that serves a call."""
    if q.shape[-1] > WIDE:
        return scan
    if q.dtype in (torch.float32, torch.float64) or padding.longest <= LONG:
        return triton_kernels
    if padding.cu_seqlens is None:
        unpadded = padding.lengths is None and padding.mask is None
        return scan if unpadded else triton_kernels
    # varlen_attn's second pass for causal costs more than ours for both; it is given as many heads of k as of q.
    alone = not dual and q.shape[1] == k.shape[1]
    return scan if alone and scan.takes_packed(q, padding) else triton_kernels
