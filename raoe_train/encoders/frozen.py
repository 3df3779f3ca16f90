"""Encoders that are asked and not trained, teachers and references: what they say is made once, and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.once import in_shards
from raoe_train.artifacts.provenance import digest, identity
from raoe_train.config import ModelConfig


def embedder(model: ModelConfig, batch_size: int, role: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Sentences to embeddings, [n, d] float32; the encoder is loaded when first asked.

    ValueError names the encoder, as `role`, and a sentence that it gives NaN for.
    """
    loaded: list[Any] = []

    def embed(sentences: Sequence[str]) -> np.ndarray:
        from raoe_train.encoders.embed import encode_sentences
        from raoe_train.encoders.load import load_encoder

        if not loaded:
            loaded.append(load_encoder(model))
        try:
            return encode_sentences(loaded[0], sentences, batch_size)
        except ValueError as error:
            raise ValueError(f"{role} {model.name}: {error}") from None

    return embed


def embeddings(model: ModelConfig, texts: Sequence[str], cache: Path | None, batch_size: int, role: str) -> np.ndarray:
    """[n, d] float32 embeddings of texts. Those in `cache`, in a folder of this encoder and these texts, are not made
    again; None keeps none. Errors as embedder's."""
    embed = embedder(model, batch_size, role)
    if cache is None:
        return embed(texts)
    made_from = {"model": identity(model), "texts": digest(list(texts)), "shard": once.SHARD}
    folder = cache / digest(made_from)[:16]
    return np.concatenate(in_shards(folder, texts, once.SHARD, embed, f"{role} {model.name}"))
