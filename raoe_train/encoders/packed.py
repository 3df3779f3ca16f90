"""Packed rows: the texts of a batch side by side in one row without padding, with attention within each text.

transformers calls the attention of raoe_kernels through its AttentionInterface, under the name PACKED, and passes the
ends of the texts on. Batches that are not packed get SDPA under that name, and under the name PADDED: with masks that
are made without reading the padding, for which transformers' own SDPA waits for a GPU in every forward.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from raoe_kernels import bidirectional_attention
from raoe_train.encoders.bidirectional.configuration import windows
from raoe_train.encoders.bidirectional.modeling import PACKED, PADDED, BidirectionalModel

OFFSET = ("camembert", "roberta", "xlm-roberta")  # their positions start after the padding token's id
ENCODERS = ("bert", "distilbert", "modernbert", *OFFSET)
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
ENDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # transformers' keywords for FlashAttention


class Packing(NamedTuple):
    """How a model reads a packed row.

    offset      position of a text's first token
    window      longest text that the sliding windows do not cut, or None
    is_flash    the model's own FlashAttention reads the row; else PACKED
    """

    offset: int = 0
    window: int | None = None
    is_flash: bool = False

    def fits(self, masks: list[Tensor]) -> bool:
        """Whether all texts of columns with these (B, L) masks can be packed: they have tokens, without gaps, and no
        more than the window."""
        for mask in masks:
            real = mask != 0
            starts = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
            if bool((starts != 1).any()) or (self.window is not None and int(real.sum(1).max()) > self.window):
                return False
        return True

    def row(self, table: dict[str, Tensor], first: np.ndarray, lengths: np.ndarray, multiple: int) -> dict[str, Any]:
        """Pack texts. Row i of the (n, L) tensors in `table` has lengths[i] tokens from first[i] on. max_length_q is
        rounded up to the multiple."""
        count, longest = len(lengths), -(-int(lengths.max()) // multiple) * multiple
        text = np.repeat(np.arange(count), lengths)
        ends = np.concatenate([[0], lengths.cumsum()])
        place = np.arange(len(text)) - ends[text]
        at = torch.from_numpy(text), torch.from_numpy(first[text] + place)
        cu_seqlens = torch.from_numpy(ends.astype(np.int32))
        row = {name: each[at][None] for name, each in table.items() if name != "attention_mask"}
        row |= {"position_ids": torch.from_numpy(place + self.offset)[None], "seq_idx": at[0][None]}
        row |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest}
        # transformers passes a mask of four dimensions on; from another it would make one of all tokens with all
        mask = {} if self.is_flash else {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.long)}
        return {**row, "max_length_k": longest, **mask}


def packing_of(model: Any) -> Packing | str:
    """How a SentenceTransformer reads packed rows, or the reason why it cannot."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if len(model) < 2 or type(model[0]) is not Transformer or type(model[1]) is not Pooling:
        return "the model is not a Transformer with Pooling"
    inner = _transformer(model)
    if not isinstance(inner, PreTrainedModel) or not type(inner).__module__.startswith("transformers.models."):
        return f"{type(inner).__name__} is not a model of transformers"
    config = inner.config
    causal = getattr(config, "is_decoder", False) and config.model_type in ENCODERS
    if config.model_type not in (*ENCODERS, *DECODERS) or causal:
        return f"the attention of {config.model_type} cannot be packed"
    attention = config._attn_implementation
    if not (is_flash := "flash" in attention) and attention not in ("sdpa", PACKED, PADDED):
        return f"the model's attention is {attention}, not sdpa"
    if config.model_type in DECODERS:
        cuts = [size for size in windows(config) if size]
    else:
        cuts = [config.sliding_window] if config.model_type == "modernbert" else []
    offset = config.pad_token_id + 1 if config.model_type in OFFSET else 0
    return Packing(offset, None if is_flash else min(cuts, default=None), is_flash)


def pack(model: Any) -> str | None:
    """Have a SentenceTransformer read packed rows; returns the reason if it cannot. Padded batches still work."""
    if isinstance(packing := packing_of(model), str):
        return packing
    if not packing.is_flash:
        _transformer(model).config._attn_implementation = PACKED
    if model[0].model_forward_params is not None:
        model[0].model_forward_params |= ENDS
    return None


def read_no_masks(model: Any) -> None:
    """Set the attention PADDED for a model with SDPA."""
    config = getattr(getattr(model, "transformers_model", None), "config", None)
    if isinstance(model, nn.Sequential) and getattr(config, "_attn_implementation", None) == "sdpa":
        _transformer(model).config._attn_implementation = PADDED


def packing_in_use(model: Any) -> Packing | None:
    """The packing of a model whose attention reads packed rows: PACKED or FlashAttention."""
    inner = _transformer(model) if isinstance(model, nn.Sequential) and hasattr(model[0], "model") else None
    attention = getattr(getattr(inner, "config", None), "_attn_implementation", None) or ""
    if attention != PACKED and "flash" not in attention:
        return None
    packing = packing_of(model)
    return packing if isinstance(packing, Packing) else None


def _transformer(model: Any) -> Any:
    """The transformers model in a SentenceTransformer: an encoder, or the decoder in a BidirectionalModel."""
    outer = model[0].model
    return outer.decoder if isinstance(outer, BidirectionalModel) else outer


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (1, heads, tokens, d) queries, keys and values, or SDPA of a padded batch."""
    if cu_seq_lens_q is None:
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)
    causal = bool(module.is_causal if is_causal is None else is_causal)
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "causal": causal}
    result = bidirectional_attention(q, k, v, cu_seqlens=cu_seq_lens_q, max_seqlen=max_length_q, **options)
    return result[None], None


def _mask(*arguments: Any, **keywords: Any) -> Any:
    return sdpa_mask(*arguments, **{**keywords, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


for name in (PACKED, PADDED):
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
