"""Encoders that are asked and not trained, teachers and references: what they say is made once, and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import resume
from raoe_train.artifacts.provenance import digest
from raoe_train.encoders.embed import encode_sentences, unit_rows
from raoe_train.encoders.settings import Encoder, identity, second_of


def embedder(encoder: Encoder, role: str, batch_size: int | None = None) -> Callable[[Sequence[str]], np.ndarray]:
    """Sentences to embeddings, [n, d] float32; the encoder is loaded when first asked. Errors call it its `role`.

    Of an encoder with a `second` one: both of norm 1, side by side, so that their cosines are the means of both's.
    """
    if (second := second_of(encoder)) is not None:
        both = [embedder(replace(encoder, second=None), role, batch_size), embedder(second, role, batch_size)]  # type: ignore[call-arg]
        return lambda sentences: np.hstack([unit_rows(embed(sentences)) for embed in both])
    prompt, asked = encoder.prompt, {"task": getattr(encoder, "task", None)}
    if prompt is not None and "{" not in prompt:  # no template: encode puts it before the text
        prompt, asked["prompt"] = None, prompt
    options = {key: value for key, value in asked.items() if value is not None}
    size: Any = batch_size or getattr(encoder, "batch_size", 64)
    loaded: list[Any] = []

    def embed(sentences: Sequence[str]) -> np.ndarray:
        from raoe_train.encoders.load import load_encoder

        if not loaded:
            loaded.append(load_encoder(replace(encoder, prompt=prompt)))
        try:
            return encode_sentences(loaded[0], sentences, size, **options)
        except ValueError as error:
            raise ValueError(f"{role} {encoder.name}: {error}") from None

    return embed


def remembered(
    encoder: Encoder, texts: Iterable[str], role: str, cache: str | Path | None = None
) -> Callable[[Sequence[str]], np.ndarray]:
    """As `embedder`, with the embeddings of `texts` made beforehand, or found in the cache; see `embeddings`. They stay
    in memory, 4 bytes a number; other sentences are asked for as they come."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    known, ask = embeddings(encoder, list(rows), role, cache), embedder(encoder, role)

    def embed(sentences: Sequence[str]) -> np.ndarray:
        if all(text in rows for text in sentences):
            return known[[rows[text] for text in sentences]]
        return ask(sentences)

    return embed


def embeddings(
    encoder: Encoder, texts: Sequence[str], role: str, cache: str | Path | None = None, batch_size: int | None = None
) -> np.ndarray:
    """[n, d] float32 embeddings of texts.

    What is in the directory `cache` (by default the encoder's own, if it has one), in a folder of this encoder and
    these texts, is not made again, and what is missing is put there, shard by shard.
    """
    embed = embedder(encoder, role, batch_size)
    cache = cache or getattr(encoder, "cache", None)
    if cache is None:
        return embed(texts)
    made_from = {"model": identity(encoder), "texts": digest(list(texts)), "shard": resume.SHARD}
    folder = Path(cache).expanduser() / digest(made_from)[:16]
    return np.concatenate(resume.in_shards(folder, texts, resume.SHARD, embed, f"{role} {encoder.name}"))
