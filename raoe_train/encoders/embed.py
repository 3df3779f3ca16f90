"""Embeddings of sentences: by a loaded encoder or a frozen one with a cache, and their nearest neighbours by cosine."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import resume
from raoe_train.artifacts.provenance import digest
from raoe_train.encoders.settings import Encoder, identity, second_of

SORTED = 4096  # sentences that are tokenised, and sorted by length, together
CHUNK = 1 << 24  # cosines at a time, 64 MiB
NONE = -1  # index of a neighbour that does not exist
Embed = Callable[[Sequence[str]], np.ndarray]
Neighbours = tuple[np.ndarray, np.ndarray]
"""[n, k] int64 indices, the nearest first, NONE where there are no more; [n, k] float32 cosines, -inf there."""


def encode_sentences(model: Any, sentences: Sequence[str], batch_size: int = 64, **options: Any) -> np.ndarray:
    """[n, d] float32 embeddings of sentences, equal ones encoded once, in runs of like length.

    Args:
        model: a SentenceTransformer.
        batch_size: a run has at most the tokens of so many sentences as long as the longest.
        options: further arguments of its `encode`, such as prompt or task.

    ValueError for no sentences, or an embedding that is not finite.
    """
    from raoe_train.encoders.lengths import encoding_by_length

    if not sentences:
        raise ValueError("sentences is empty: there is nothing to encode")
    places = {text: place for place, text in enumerate(dict.fromkeys(sentences))}
    training, bar = model.training, sys.stderr.isatty() and len(places) > SORTED  # a bar of one step says nothing
    with encoding_by_length(model, batch_size):
        distinct = model.encode(list(places), batch_size=SORTED, show_progress_bar=bar, **options)
    model.train(training)
    distinct = np.asarray(distinct, dtype=np.float32)
    finite = np.isfinite(distinct).all(axis=1)
    if not finite.all():
        text = list(places)[int(np.argmin(finite))]
        raise ValueError(f"the encoder gives NaN or infinity for {np.sum(~finite)} sentences, the first {text!r}")
    return distinct[[places[text] for text in sentences]]


def embedder(encoder: Encoder, role: str) -> Embed:
    """A function from sentences to embeddings by a frozen encoder, loaded at the first call. Errors call it its `role`.
    An encoder with a `second` gives both, of norm 1 and side by side: cosines are means of the two."""
    if (second := second_of(encoder)) is not None:
        first: Any = replace(encoder, second=None)  # type: ignore[call-arg]
        both = [embedder(each, role) for each in (first, second)]
        return lambda sentences: np.hstack([unit_rows(embed(sentences)) for embed in both])
    prompt, task = encoder.prompt, getattr(encoder, "task", None)
    options = {} if task is None else {"task": task}
    if prompt is not None and "{" not in prompt:  # no template: encode puts it before the text
        prompt, options["prompt"] = None, prompt
    size: Any = getattr(encoder, "batch_size", 64)

    @functools.cache
    def load() -> Any:
        from raoe_train.encoders.load import load_encoder

        return load_encoder(replace(encoder, prompt=prompt))

    def embed(sentences: Sequence[str]) -> np.ndarray:
        model = load()
        try:
            return encode_sentences(model, sentences, size, **options)
        except ValueError as error:
            raise ValueError(f"{role} {encoder.name}: {error}") from None

    return embed


def remembered(encoder: Encoder, texts: Iterable[str], role: str, cache: str | Path | None = None) -> Embed:
    """As `embedder`, with the `embeddings` of `texts` computed beforehand and kept in memory."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    known, ask = embeddings(encoder, list(rows), role, cache), embedder(encoder, role)

    def embed(sentences: Sequence[str]) -> np.ndarray:
        if all(text in rows for text in sentences):
            return known[[rows[text] for text in sentences]]
        return ask(sentences)

    return embed


def embeddings(encoder: Encoder, texts: Sequence[str], role: str, cache: str | Path | None = None) -> np.ndarray:
    """[n, d] float32 embeddings of texts by a frozen encoder. A directory `cache` (by default the encoder's own) keeps
    them shard by shard, in a folder of this encoder and these texts."""
    embed = embedder(encoder, role)
    cache = cache or getattr(encoder, "cache", None)
    if cache is None:
        return embed(texts)
    key = digest({"model": identity(encoder), "texts": digest(list(texts)), "shard": resume.SHARD})
    folder = Path(cache).expanduser() / key[:16]
    return resume.gathered(resume.share(folder, texts, resume.SHARD, embed, f"{role} {encoder.name}"))


def unit_rows(embeddings: np.ndarray) -> np.ndarray:
    """[n, d] embeddings with rows of norm 1, in their own dtype; zero rows stay zero."""
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return np.divide(embeddings, norms, out=np.zeros_like(embeddings), where=norms > 0)


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Raw cosine of each pair of rows of two [n, d] arrays, [n] float64 from -1 to 1; 0 where a row is zero."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    quotients = np.divide((a * b).sum(axis=1), norms, out=np.zeros(len(a)), where=norms > 0)
    return np.clip(quotients, -1, 1)  # a sentence with itself may have 1.0000000000000002


def rounding(embeddings: np.ndarray) -> float:
    """How much rounding alone may change cosines of [n, d] embeddings, by the dtype that holds them exactly."""
    # In batches of 64 and of 3, MiniLM's cosines of 300 pairs differ by 2.5e-3, 3.1e-4 and 3.9e-7 at most
    if not (embeddings.astype(np.float32).view(np.uint32) & 0xFFFF).any():
        return 2**-8
    return 2**-11 if np.array_equal(embeddings.astype(np.float16), embeddings) else 2**-21


def nearest(queries: np.ndarray, candidates: np.ndarray, k: int) -> Neighbours:
    """The k candidates ([m, d] unit rows) nearest to each query ([n, d] unit rows), or as many as there are."""
    return _stacked([_best(cosines, k) for _, cosines in _chunks(queries, candidates)])


def nearest_by_class(unit: np.ndarray, classes: np.ndarray, k: int) -> tuple[Neighbours, Neighbours]:
    """Of each of [n, d] unit rows: the k nearest others of its own class (of [n] integers `classes`), and the k nearest
    of all other classes together."""
    import torch

    class_of = torch.from_numpy(classes)
    own, others = [], []
    for first, cosines in _chunks(unit, unit):
        rows = torch.arange(first, first + len(cosines))
        same = class_of[rows][:, None] == class_of
        others.append(_best(cosines.masked_fill(same, -torch.inf), k))
        cosines.masked_fill_(~same, -torch.inf)[torch.arange(len(rows)), rows] = -torch.inf
        own.append(_best(cosines, k))
    return _stacked(own), _stacked(others)


def _chunks(queries: np.ndarray, candidates: np.ndarray) -> Iterator[tuple[int, Any]]:
    """(first row, [rows, m] cosines) of as many queries at a time as CHUNK allows."""
    import torch

    first, second = (torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32)) for rows in (queries, candidates))
    rows = max(1, CHUNK // max(1, len(candidates)))
    for start in range(0, len(queries), rows):
        yield start, first[start : start + rows] @ second.T


def _best(cosines: Any, k: int) -> Neighbours:
    values, places = cosines.topk(min(k, cosines.shape[1]), dim=1)
    places = places.masked_fill(values.isneginf(), NONE).numpy()
    short = ((0, 0), (0, k - places.shape[1]))
    return np.pad(places, short, constant_values=NONE), np.pad(values.numpy(), short, constant_values=-np.inf)


def _stacked(parts: list[Neighbours]) -> Neighbours:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
