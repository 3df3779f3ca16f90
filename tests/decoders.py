"""Tiny decoders of every supported architecture, and a saved one with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from tests.tiny import SENTENCES

WINDOW = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# name: (model_type, further settings)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": WINDOW,
                               "layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
}  # fmt: skip


def tiny_decoder(name: str, attention: str = "eager", **changes: Any) -> Any:
    """A decoder of three layers. Equal arguments give equal random weights."""
    kind, own = DECODERS[name]
    config = CONFIG_MAPPING[kind](**{**SIZES, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AutoModel.from_config(config, attn_implementation=attention).eval()


def tiny_language_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Such a decoder with a head, its weights large enough that texts vary."""
    kind, own = DECODERS[name]
    sizes = {**SIZES, "initializer_range": 0.4, "tie_word_embeddings": False, "num_hidden_layers": 2}
    config = CONFIG_MAPPING[kind](**{**sizes, **own, "layer_types": None, **changes} if "layer_types" in own else
                                  {**sizes, **own, **changes})  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def sequences() -> list[torch.Tensor]:
    """Token ids of four sequences, one of a single token and one longer than the window both ways."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (length,), generator=generator) for length in (8, 3, 5, 1)]


def padded(side: str, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both (4, 8)."""
    rows = sequences()
    ids, mask = torch.full((4, 8), fill), torch.zeros(4, 8, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(8 - len(row), 8)
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


def saved_decoder(folder: Path, kind: str = "llama") -> str:
    """A plain decoder with a tokenizer, as a hub has them; its sizes are those that 4-bit weights want."""
    from benchmarks.studies.pretrain import small_llama  # which needs datasets, missing on the GPU machine

    sizes = {"vocab_size": 320, "hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 64}
    with torch.random.fork_rng(devices=[]):
        model, tokenizer = small_llama(SENTENCES, 48, **sizes)
    name, inner = str(folder / kind), model.model
    if kind != "llama":
        config = CONFIG_MAPPING[kind](**{key: getattr(inner.config, key) for key in SIZES}, tie_word_embeddings=True)
        inner = AutoModel.from_config(config)
    inner.save_pretrained(name)
    tokenizer.save_pretrained(name)
    assert AutoConfig.from_pretrained(name).model_type == kind
    return name
