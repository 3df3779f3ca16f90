"""Texts side by side in one row without padding, attention keeping to each text: no flash-attn needed.

`pack` makes sentence-transformers' own form of such a batch and has transformers call our attention, which goes by
`cu_seq_lens_q` and gives batches with padding to SDPA.
"""

import logging
from collections.abc import Container
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from raoe_kernels import bidirectional_attention, dual_attention
from raoe_train.encoders.bidirectional.configuration import windows
from raoe_train.encoders.bidirectional.modeling import PACKED, BidirectionalModel

logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)

OFFSET = ("camembert", "roberta", "xlm-roberta")  # positions are counted from behind the padding token's id
ENCODERS = ("bert", "distilbert", "modernbert", *OFFSET)  # model_type of those that this was tested with
DEVICES = ("cuda",)  # on a CPU the layers take as long as in runs of like length, with our attention 4 % longer


def pack(model: Any, features: dict[str, Any], devices: Container[str] = DEVICES) -> dict[str, Any]:
    """The texts of `features` without padding, for the same embeddings and gradients but for rounding and dropout's
    draws; `features` themselves where there is no padding, or with one warning where they cannot be packed.

    Args:
        model: a SentenceTransformer. The first call makes PACKED its attention, which serves padded batches, too.
        features: as its `preprocess` gives them, on its device, padded on either side.
        devices: where texts are packed.
    """
    mask = features.get("attention_mask")
    if mask is None or mask.ndim != 2 or "cu_seq_lens_q" in features or mask.device.type not in devices:
        return features
    longest, real = mask.shape[1], mask.bool()
    if (reason := why_not(model, longest)) is not None:
        warn_once(f"texts stay padded, in runs of like length: {reason}")
        return features
    token = real.flatten().nonzero().squeeze(1)
    if len(token) == mask.numel():
        return features
    transformer = _inner(model)
    transformer.config._attn_implementation = PACKED
    if transformer.config.model_type in OFFSET:
        positions = real.long().cumsum(1) + transformer.config.pad_token_id
    else:
        positions = torch.arange(longest, device=mask.device).expand(mask.shape)
    alike = {key: value for key, value in features.items() if isinstance(value, Tensor) and value.shape == mask.shape}
    return {
        **features,
        **{key: value.flatten()[token][None] for key, value in {**alike, "position_ids": positions}.items()},
        # with four dimensions it is handed on as it is: no mask of all texts with all is made
        "attention_mask": mask.new_ones(1, 1, 1, len(token)),
        "cu_seq_lens_q": pad(real.sum(1).cumsum(0), (1, 0)).int(),
        "max_length_q": longest,
    }


def why_not(model: Any, longest: int = 0) -> str | None:
    """Why texts of up to `longest` tokens cannot be packed for a SentenceTransformer, None where they can."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if len(model) < 2 or type(model[0]) is not Transformer or type(model[1]) is not Pooling:
        return "it is no Transformer with Pooling"
    inner = _inner(model)
    if not isinstance(inner, PreTrainedModel):
        return f"its {type(inner).__name__} is none of transformers'"
    config, decoder = inner.config, inner is not model[0].model
    encoder = config.model_type in ENCODERS and not getattr(config, "is_decoder", False)
    if not (decoder or encoder) or not type(inner).__module__.startswith("transformers.models."):
        return f"{type(inner).__name__} does not let its attention be told where a text ends"
    if config._attn_implementation not in ("sdpa", PACKED):
        return f"its attention is {config._attn_implementation}"
    if inner.training and any(getattr(config, key, 0) for key in ("attention_dropout", "attention_probs_dropout_prob")):
        return "it drops attention weights in training (attention_dropout, attention_probs_dropout_prob)"
    seen = windows(config) if decoder else [getattr(config, "sliding_window", None)]
    if any(window is not None and longest > window for window in seen):
        return f"a text may be longer than its sliding window of {min(window for window in seen if window)} tokens"
    return None


def _inner(model: Any) -> Any:
    """transformers' own model: the encoder or the decoder."""
    outer = model[0].model
    return outer.decoder if isinstance(outer, BidirectionalModel) else outer


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if cu_seq_lens_q is None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("dropout"):
        raise ValueError("packed texts have no dropout of attention weights")
    ends: dict[str, Any] = {"cu_seqlens": cu_seq_lens_q, "max_seqlen": max_length_q, "scale": kwargs.get("scaling")}
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    if kwargs.get("is_causal", module.is_causal):
        return dual_attention(q, k, v, **ends)[0][None], None
    return bidirectional_attention(q, k, v, **ends)[None], None


AttentionInterface.register(PACKED, _attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
