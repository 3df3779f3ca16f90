"""Backend "auto" on CUDA without a compiled module: the Triton kernel up to its largest batch, else scan."""

from __future__ import annotations

from torch import Tensor

from . import scan, triton_kernels
from .params import PairwiseParams, backward, by_row

__all__ = ["backward", "forward"]


@by_row
def forward(
    similarity: Tensor, scores: Tensor, labels: Tensor | None, params: PairwiseParams, need_grad: bool
) -> tuple[Tensor, Tensor | None]:
    module = triton_kernels if len(similarity) <= triton_kernels.max_pairs(similarity, scores) else scan
    return module.forward(similarity, scores, labels, params, need_grad)
