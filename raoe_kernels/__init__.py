"""Fused, differentiable ops for training sentence embeddings with ranking and angular losses."""

from __future__ import annotations

import torch as _torch

from raoe_kernels import attention as _attention
from raoe_kernels import contrastive as _contrastive
from raoe_kernels import cosine as _cosine
from raoe_kernels import guidance as _guidance
from raoe_kernels import listwise as _listwise
from raoe_kernels import pairwise as _pairwise
from raoe_kernels._dispatch import use_backend
from raoe_kernels.attention import bidirectional_attention, dual_attention
from raoe_kernels.contrastive import info_nce_loss
from raoe_kernels.cosine import pairwise_cosine
from raoe_kernels.guidance import guided_argmax, guided_log_probs
from raoe_kernels.listwise import list_mle_loss, refine_similarity
from raoe_kernels.pairwise import cosent_loss, gated_angular_loss, rank_margin_loss, raoe_loss

__version__ = "0.1.0"

__all__ = [
    "backends",
    "bidirectional_attention",
    "cosent_loss",
    "dual_attention",
    "gated_angular_loss",
    "guided_argmax",
    "guided_log_probs",
    "info_nce_loss",
    "list_mle_loss",
    "pairwise_cosine",
    "rank_margin_loss",
    "raoe_loss",
    "refine_similarity",
    "use_backend",
]


def backends(device: _torch.device | str | None = None) -> dict[str, dict[str, bool | str]]:
    """Per public function and backend name: True if it can run on `device`, else the reason why not.

    device defaults to "cuda" where torch sees one, and to "cpu" elsewhere.
    """
    if device is None:
        device = "cuda" if _torch.cuda.is_available() else "cpu"
    device = _torch.device(device)
    ops = (_pairwise.OP, _cosine.OP, _contrastive.OP, _attention.OP, _guidance.OP, _listwise.OP)
    return {function: op.available(device) for op in ops for function in op.functions}
