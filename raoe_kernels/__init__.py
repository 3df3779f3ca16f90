"""Fused ops for training sentence encoders: contrastive, ranking and angular losses, cosine similarity, attention."""

from __future__ import annotations

import torch as _torch

from . import attention as _attention
from . import cosine as _cosine
from . import guided as _guided
from . import infonce as _infonce
from . import listwise as _listwise
from . import pairwise as _pairwise
from . import sigmoid as _sigmoid
from ._dispatch import use_backend
from .attention import bidirectional_attention, dual_attention
from .cosine import pairwise_cosine
from .guided import guided_argmax, guided_log_probs
from .infonce import info_nce_loss
from .listwise import list_mle_loss, refine_similarity
from .pairwise import cosent_loss, gated_angular_loss, rank_margin_loss, raoe_loss
from .sigmoid import sigmoid_loss

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
    "sigmoid_loss",
    "use_backend",
]


def backends(device: _torch.device | str | None = None) -> dict[str, dict[str, bool | str]]:
    """Return which backends can run each function on `device`.

    For each function, the result maps every backend name to True, or to the reason why the backend cannot run the
    function. `device` defaults to "cuda" if torch detects a GPU, otherwise to "cpu".
    """
    if device is None:
        device = "cuda" if _torch.cuda.is_available() else "cpu"
    device = _torch.device(device)
    ops = (_pairwise.OP, _cosine.OP, _infonce.OP, _sigmoid.OP, _attention.OP, _guided.OP, _listwise.OP)
    return {function: op.available(device) for op in ops for function in op.functions}
