"""Packed batches: all texts in one row without padding, with attention within each text and without flash-attn.

`pack` makes such a batch in sentence-transformers' format and has transformers call our attention, which reads the
texts' ends from `cu_seq_lens_q`, and hands padded batches to SDPA.
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

OFFSET = ("camembert", "roberta", "xlm-roberta")  # their positions start at the padding token's id + 1
ENCODERS = ("bert", "distilbert", "modernbert", *OFFSET)  # model_type of the encoders that were tested
DEVICES = ("cuda",)  # on a CPU packing is no faster than runs of similar length (attention takes 4 % longer)


def pack(model: Any, features: dict[str, Any], devices: Container[str] = DEVICES) -> dict[str, Any]:
    """Pack the texts of `features` without padding; embeddings and gradients stay the same up to rounding and dropout.
    Returns `features` unchanged if there is no padding or, with one warning, if they cannot be packed.

    Args:
        model: a SentenceTransformer. The first call sets its attention to PACKED, which also handles padded batches.
        features: output of the model's `preprocess`, on its device, padded on either side.
        devices: device types on which texts are packed.
    """
    mask = features.get("attention_mask")
    if mask is None or mask.ndim != 2 or "cu_seq_lens_q" in features or mask.device.type not in devices:
        return features
    longest, real = mask.shape[1], mask.bool()
    if (reason := why_not(model, longest)) is not None:
        warn_once(f"texts are not packed but padded in runs of similar length: {reason}")
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
        # transformers passes a mask of four dimensions on; from another it would make one of all tokens with all
        "attention_mask": mask.new_ones(1, 1, 1, len(token)),
        "cu_seq_lens_q": pad(real.sum(1).cumsum(0), (1, 0)).int(),
        "max_length_q": longest,
    }


def why_not(model: Any, longest: int = 0) -> str | None:
    """Why texts of up to `longest` tokens cannot be packed for a SentenceTransformer; None if they can."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if len(model) < 2 or type(model[0]) is not Transformer or type(model[1]) is not Pooling:
        return "the model is not a Transformer with Pooling"
    inner = _inner(model)
    if not isinstance(inner, PreTrainedModel):
        return f"{type(inner).__name__} is not a transformers model"
    config, decoder = inner.config, inner is not model[0].model
    encoder = config.model_type in ENCODERS and not getattr(config, "is_decoder", False)
    if not (decoder or encoder) or not type(inner).__module__.startswith("transformers.models."):
        return f"{type(inner).__name__} cannot pass the ends of texts to its attention"
    if config._attn_implementation not in ("sdpa", PACKED):
        return f"the model's attention is {config._attn_implementation}, not sdpa"
    if inner.training and any(getattr(config, key, 0) for key in ("attention_dropout", "attention_probs_dropout_prob")):
        return "the model has attention dropout (attention_dropout, attention_probs_dropout_prob)"
    seen = windows(config) if decoder else [getattr(config, "sliding_window", None)]
    if any(window is not None and longest > window for window in seen):
        return f"a text may be longer than the sliding window of {min(window for window in seen if window)} tokens"
    return None


def _inner(model: Any) -> Any:
    """The transformers model in a SentenceTransformer: an encoder, or the decoder in a BidirectionalModel."""
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
        raise ValueError("attention dropout is not supported for packed texts")
    ends: dict[str, Any] = {"cu_seqlens": cu_seq_lens_q, "max_seqlen": max_length_q, "scale": kwargs.get("scaling")}
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    if kwargs.get("is_causal", module.is_causal):
        return dual_attention(q, k, v, **ends)[0][None], None
    return bidirectional_attention(q, k, v, **ends)[None], None


AttentionInterface.register(PACKED, _attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
