"""Packed rows: all texts in a batch, joined into one row without padding. Each text attends only to itself.

The attention function in raoe_kernels is registered in transformers' AttentionInterface under the name PACKED, and
receives the text boundaries. Padded batches use SDPA, under the name PACKED or PADDED, with masks that are built
without waiting for the GPU. In contrast, transformers' own SDPA first checks whether the batch contains padding, and
therefore waits for the GPU in every forward pass.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from raoe_kernels import backends, bidirectional_attention
from raoe_train.encoders.bidirectional.configuration import windows
from raoe_train.encoders.bidirectional.modeling import PACKED, PADDED, BidirectionalModel

OFFSET = ("camembert", "roberta", "xlm-roberta")  # positions start after the padding token's id
ENCODERS = ("bert", "distilbert", "modernbert", *OFFSET)
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
ENDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # transformers' keywords for FlashAttention
TOKENS, TEXTS, LENGTHS = 512, 64, 64  # captured rows are filled up to multiples of these sizes (see add_texts)
OF_ROWS = {*ENDS, "position_ids", "seq_idx"}  # features that only packed rows have


class Packing(NamedTuple):
    """Describes how a model reads packed rows.

    Args:
        offset: position id of a text's first token.
        window: maximum number of tokens in a text that fits into the sliding windows, or None without such windows.
        is_flash: whether the model's own FlashAttention reads the row, instead of the PACKED attention.
        skips: whether pooling leaves out prompt tokens; if so, `_pool_without_prompts` drops them before pooling.
    """

    offset: int = 0
    window: int | None = None
    is_flash: bool = False
    skips: bool = False

    def fits(self, texts: Any) -> bool:
        """Return whether texts can be packed: no text contains padding or has more than `window` tokens."""
        return bool(texts.real.all()) and (self.window is None or int(texts.lengths.max()) <= self.window)

    def row(
        self, starts: np.ndarray, lengths: np.ndarray, multiple: int, prompt_length: int | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Pack texts into one row. Text i has lengths[i] tokens, and its first token is at index starts[i]. Return ((1,
        tokens) indices of the row's tokens, the row's other features). The feature max_length_q is rounded up to a
        multiple of `multiple`."""
        text = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.concatenate([[0], lengths.cumsum()])
        position = np.arange(len(text)) - ends[text]
        cu_seqlens, longest = torch.from_numpy(ends.astype(np.int32)), -(-int(lengths.max()) // multiple) * multiple
        row: dict[str, Any] = {"position_ids": torch.from_numpy(position + self.offset)[None]}
        row |= {"seq_idx": torch.from_numpy(text)[None], "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        row |= {"max_length_q": longest, "max_length_k": longest}
        skipped = (prompt_length or 0) if self.skips else 0
        if 0 < skipped < lengths.min():
            kept = position >= skipped
            row["pooled_tokens"] = torch.from_numpy(kept.nonzero()[0])
            row["pooled_texts"] = torch.from_numpy(text[kept])
            row["pooled_ends"] = torch.from_numpy(ends - skipped * np.arange(len(ends)))
        # transformers leaves a four-dimensional mask unchanged, but expands other masks to (tokens x tokens)
        row["attention_mask"] = None if self.is_flash else torch.ones(1, 1, 1, 1, dtype=torch.long, device="cpu")
        return (starts[text] + position)[None], row


def add_texts(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill a packed row with prefixes of its longest text, until the number of texts is a multiple of TEXTS and the
    number of tokens is a multiple of TOKENS. This limits the number of row sizes, each of which needs its own CUDA
    graph. The arguments are the same as for Packing.row."""
    longest, more = lengths.argmax(), -len(lengths) % TEXTS
    while (tokens := more + -(lengths.sum() + more) % TOKENS) > more * lengths[longest]:
        more += TEXTS
    added = np.diff(np.linspace(0, tokens, more + 1).astype(lengths.dtype))
    return np.append(starts, np.full(more, starts[longest])), np.append(lengths, added)


def packing_of(model: Any) -> Packing | str:
    """Return how a SentenceTransformer reads packed rows, or the reason why it cannot read them."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    modules = [*model] if isinstance(model, nn.Sequential) else []
    if [*map(type, modules[:2])] != [Transformer, Pooling]:
        return "the model is not a Transformer with Pooling"
    outer = model[0].model
    inner = outer.decoder if isinstance(outer, BidirectionalModel) else outer
    if not isinstance(inner, PreTrainedModel) or not type(inner).__module__.startswith("transformers.models."):
        return f"{type(inner).__name__} is not a transformers model"
    config = inner.config
    kind, attention = config.model_type, config._attn_implementation
    if kind not in (*ENCODERS, *DECODERS) or (kind in ENCODERS and getattr(config, "is_decoder", False)):
        return f"packed attention does not support {kind}"
    if attention != PACKED and "flash" not in attention:
        return f"the model's attention is {attention}, not sdpa"
    sizes = windows(config) if kind in DECODERS else [config.sliding_window] if kind == "modernbert" else []
    window = min(filter(None, sizes), default=None) if attention == PACKED else None
    pooling = modules[1]
    skips = not pooling.include_prompt and "weightedmean" not in pooling.pooling_mode  # its weights count prompt tokens
    return Packing(config.pad_token_id + 1 if kind in OFFSET else 0, window, attention != PACKED, skips)


def is_default(device: torch.device) -> bool:
    """Return whether packing is the default on a device: True on CUDA with Triton (see docs/by-length.md)."""
    return device.type == "cuda" and backends(device)["bidirectional_attention"]["triton"] is True


def pack(model: Any, packed: bool = True) -> str | None:
    """Let a SentenceTransformer with SDPA also read packed rows. Return None if the model can read packed rows, else
    the reason why it cannot. With packed=False, the model reads only padded batches, and their masks are built without
    waiting for the GPU."""
    inner = getattr(model, "transformers_model", None)
    config: Any = getattr(getattr(inner, "decoder", inner), "config", None)  # a BidirectionalModel has a decoder
    before = getattr(config, "_attn_implementation", None)
    if before in ("sdpa", PADDED):
        config._attn_implementation = PACKED
    if isinstance(packing := packing_of(model), str):
        if before:
            config._attn_implementation = before
        return packing
    if not packed and before != PACKED and not packing.is_flash:
        config._attn_implementation = PADDED
    if model[0].model_forward_params is not None:
        model[0].model_forward_params |= ENDS
    if packing.skips and _pool_without_prompts not in model[1]._forward_pre_hooks.values():
        model[1].register_forward_pre_hook(_pool_without_prompts)
    return None


def _pool_without_prompts(pooling: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop prompt tokens before pooling. Otherwise, Pooling would search for the prompts on the device."""
    features, *others = arguments
    if "pooled_tokens" in features:
        features = {name: value for name, value in features.items() if name != "prompt_length"}
        features["token_embeddings"] = features["token_embeddings"].index_select(1, features["pooled_tokens"])
        features["cu_seq_lens_q"], features["seq_idx"] = features["pooled_ends"], features["pooled_texts"][None]
    return features, *others


def without_pooler(model: Any) -> bool:
    """Let DistributedDataParallel ignore BERT's pooler, which a packed model computes but does not use. Return whether
    the model is packed. A packed model uses all other weights, so DDP does not need find_unused_parameters."""
    if not isinstance(packing_of(model), Packing):
        return False
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters() if ".pooler." in name]
    return True


def vary_sizes(run: dict[str, Any]) -> dict[str, Any]:
    """Mark the sizes of a packed row as dynamic, so that torch.compile creates one graph for all rows. Only the sizes
    of tensors can be dynamic, so the length of the longest text is passed as the size of an empty tensor."""
    if run.get("cu_seq_lens_q") is None or run["attention_mask"] is None:  # a padded batch, or FlashAttention
        return run
    run = {**run, "max_length_q": run["input_ids"].new_empty(0, run["max_length_q"])}
    for value in run.values():
        if isinstance(value, Tensor) and value.shape[-1] > 1:
            torch._dynamo.maybe_mark_dynamic(value, value.ndim - 1)
    return run


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
    max_length_q: int | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for packed queries, keys and values, (1, heads, tokens, d), or SDPA for a padded batch."""
    if cu_seq_lens_q is None:
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)
    longest = max_length_q.shape[1] if isinstance(max_length_q, Tensor) else max_length_q  # from vary_sizes
    causal = bool(module.is_causal if is_causal is None else is_causal)
    # squeeze, not [0], whose backward copies the gradient into a tensor of zeros
    q, k, v = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "causal": causal}
    result = bidirectional_attention(q, k, v, cu_seqlens=cu_seq_lens_q, max_seqlen=longest, **options)
    return result[None], None


def _mask(*arguments: Any, **keywords: Any) -> Any:
    return sdpa_mask(*arguments, **{**keywords, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


for name in (PACKED, PADDED):
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
