"""Encoders that are asked and not trained, teachers and references: what they say is made once, and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest, identity
from raoe_train.artifacts.writing import replacing
from raoe_train.config import ModelConfig

Item = TypeVar("Item")

SHARD = 4096  # sentences; what a kill can cost


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
    made_from = {"model": identity(model), "texts": digest(list(texts)), "shard": SHARD}
    folder = cache / digest(made_from)[:16]
    return np.concatenate(in_shards(folder, texts, SHARD, embed, f"{role} {model.name}"))


def in_shards(
    folder: Path, items: Sequence[Item], size: int, make: Callable[[Sequence[Item]], np.ndarray], name: str
) -> list[np.ndarray]:
    """`make` of each run of `size` items, from `folder` where it was made before.

    Under torchrun each process makes its own share and waits for the others'.
    """
    paths = [folder / f"{number:06d}.npy" for number in range(-(-len(items) // size))]
    for number in tqdm(own_missing(paths), desc=name, unit="shard", disable=None):
        with replacing(paths[number]) as temporary:
            np.save(temporary, make(items[number * size : (number + 1) * size]))
    while not all(path.exists() for path in paths):
        time.sleep(0.2)
    return [np.load(path) for path in paths]


def own_missing(paths: Sequence[Path]) -> list[int]:
    """The numbers of the files that are this process's to make and are not there: what a shard holds never depends on
    how many processes there are."""
    rank, world = rank_and_world()
    return [number for number, path in enumerate(paths) if number % world == rank and not path.exists()]
