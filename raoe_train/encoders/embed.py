"""Embeddings of sentences, by a loaded encoder or a frozen one with a cache, and nearest neighbours by cosine."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.artifacts import resume
from raoe_train.artifacts.provenance import digest
from raoe_train.encoders.settings import Encoder, identity

SORTED = 4096  # sentences that are tokenised and sorted by length together
CHUNK = 1 << 24  # cosines that are in memory at a time, 64 MiB
NONE = -1  # index of a neighbour that does not exist
Embed = Callable[[Sequence[str]], np.ndarray]
Neighbours = tuple[np.ndarray, np.ndarray]
"""([n, k] int64 indices, the nearest first, NONE after the last neighbour; [n, k] float32 cosines, -inf for NONE)."""


def encode_sentences(model: Any, sentences: Sequence[str], batch_size: int = 64, **options: Any) -> np.ndarray:
    """Encode sentences in runs of similar length, each distinct sentence once; returns [n, d] float32.

    Args:
        model: a SentenceTransformer.
        batch_size: limit for a run, as a number of sentences that are all as long as the longest.
        options: further arguments of the model's `encode`, such as prompt or task.

    ValueError if there are no sentences, or for an embedding that is not finite.
    """
    from raoe_train.encoders.lengths import encoding_by_length

    if not sentences:
        raise ValueError("sentences is empty: there is nothing to encode")
    places = {text: place for place, text in enumerate(dict.fromkeys(sentences))}
    training, bar = model.training, sys.stderr.isatty() and len(places) > SORTED  # no bar for a single step
    with encoding_by_length(model, batch_size):
        distinct = model.encode(list(places), batch_size=SORTED, show_progress_bar=bar, **options)
    model.train(training)
    distinct = np.asarray(distinct, dtype=np.float32)
    finite = np.isfinite(distinct).all(axis=1)
    if not finite.all():
        text = list(places)[int(np.argmin(finite))]
        raise ValueError(f"the encoder returns NaN or infinity for {np.sum(~finite)} sentences, first for {text!r}")
    return distinct[[places[text] for text in sentences]]


def print_cut(model: Any, texts: Iterable[str], source: str, prompt: str | None = None) -> None:
    """Print how many texts of a source are longer than a SentenceTransformer's max_seq_length; by default with its
    default prompt."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    limit = getattr(model, "max_seq_length", None)
    if limit is None or not hasattr(tokenizer, "num_special_tokens_to_add"):
        return
    prompt = model.prompts.get(model.default_prompt_name, "") if prompt is None else prompt
    room = limit - tokenizer.num_special_tokens_to_add(False) - 1
    counts = Counter(texts)
    # tokens are at most as many as bytes, and SentencePiece's at the start
    maybe = [text for text in counts if len(prompt) + len(text) > room or len((prompt + text).encode()) > room]
    cut = 0
    for start in range(0, len(maybe), SORTED):
        chunk = maybe[start : start + SORTED]
        tokens = tokenizer([prompt + text for text in chunk], truncation=False, verbose=False)["input_ids"]
        cut += sum(counts[text] for text, row in zip(chunk, tokens, strict=True) if len(row) > limit)
    if cut:
        print(f"{source}: {cut} of {counts.total()} texts are longer than max_seq_length {limit} and cut", flush=True)


def embedder(encoder: Encoder, role: str, texts: Iterable[str] = ()) -> Embed:
    """Create a function from sentences to a frozen encoder's embeddings; its first call loads the encoder, and prints
    how many of `texts` it will cut. Errors name the encoder by its `role`. With a `second` encoder, unit embeddings of
    both are joined, so that cosines are averaged."""
    if (second := getattr(encoder, "second", None)) is not None:
        first: Any = replace(encoder, second=None)  # type: ignore[call-arg]
        members = [embedder(each, role, texts) for each in (first, second)]
        return lambda sentences: np.hstack([unit_rows(embed(sentences)) for embed in members])
    prompt, task = encoder.prompt, getattr(encoder, "task", None)
    options = {} if task is None else {"task": task}
    if prompt is not None and "{" not in prompt:  # not a template: encode puts it before each text
        prompt, options["prompt"] = None, prompt
    size: Any = getattr(encoder, "batch_size", 64)

    @functools.cache
    def load() -> Any:
        from raoe_train.encoders.load import load_encoder

        model = load_encoder(replace(encoder, prompt=prompt))
        print_cut(model, texts, f"{role} {encoder.name}", options.get("prompt"))
        return model

    def embed(sentences: Sequence[str]) -> np.ndarray:
        model = load()
        try:
            return encode_sentences(model, sentences, size, **options)
        except ValueError as error:
            raise ValueError(f"{role} {encoder.name}: {error}") from None

    return embed


def remembered(encoder: Encoder, texts: Iterable[str], role: str, cache: str | Path | None = None) -> Embed:
    """Like `embedder`, but compute the embeddings of `texts` beforehand and keep them in memory."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    table, compute = embeddings(encoder, list(rows), role, cache), embedder(encoder, role)

    def embed(sentences: Sequence[str]) -> np.ndarray:
        if all(text in rows for text in sentences):
            return table[[rows[text] for text in sentences]]
        return compute(sentences)

    return embed


def embeddings(encoder: Encoder, texts: Sequence[str], role: str, cache: str | Path | None = None) -> np.ndarray:
    """Encode texts by a frozen encoder; returns [n, d] float32. The directory `cache` (by default the encoder's own)
    keeps the embeddings as shards, in a folder for this encoder and these texts."""
    embed = embedder(encoder, role, texts)
    cache = cache or getattr(encoder, "cache", None)
    if cache is None:
        return embed(texts)
    key = digest({"model": identity(encoder), "texts": digest(list(texts)), "shard": resume.SHARD})
    folder = Path(cache).expanduser() / key[:16]
    return resume.gather(resume.share(folder, texts, resume.SHARD, embed, f"{role} {encoder.name}"))


def unit_rows(embeddings: np.ndarray) -> np.ndarray:
    """Scale the rows of [n, d] embeddings to norm 1, in their dtype; zero rows stay zero."""
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return np.divide(embeddings, norms, out=np.zeros_like(embeddings), where=norms > 0)


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine of each pair of rows in two [n, d] arrays, [n] float64 from -1 to 1; 0 if one of the rows is zero."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    quotients = np.divide((a * b).sum(axis=1), norms, out=np.zeros(len(a)), where=norms > 0)
    return np.clip(quotients, -1, 1)  # rounding can give 1.0000000000000002


def rounding(embeddings: np.ndarray) -> float:
    """Bound for rounding errors in cosines of [n, d] embeddings, by the smallest dtype that holds them exactly."""
    # MiniLM's cosines of 300 pairs, in batches of 64 and 3, differ by up to 2.5e-3 (bf16), 3.1e-4 (fp16), 3.9e-7 (fp32)
    if not (embeddings.astype(np.float32).view(np.uint32) & 0xFFFF).any():
        return 2**-8
    return 2**-11 if np.array_equal(embeddings.astype(np.float16), embeddings) else 2**-21


def nearest(queries: np.ndarray, candidates: np.ndarray, k: int) -> Neighbours:
    """Find the k candidates ([m, d] unit rows) nearest to each query ([n, d] unit rows); all if there are fewer."""
    return _concatenate([_best(cosines, k) for _, cosines in _chunks(queries, candidates)])


def nearest_by_class(unit: np.ndarray, classes: np.ndarray, k: int) -> tuple[Neighbours, Neighbours]:
    """For each of [n, d] unit rows, find the k nearest other rows of its own class, and the k nearest rows of all other
    classes together; `classes` is [n] integers."""
    import torch

    class_of = torch.from_numpy(classes)
    same_class, other_classes = [], []
    for start, cosines in _chunks(unit, unit):
        rows = torch.arange(start, start + len(cosines))
        is_same = class_of[rows][:, None] == class_of
        other_classes.append(_best(cosines.masked_fill(is_same, -torch.inf), k))
        cosines.masked_fill_(~is_same, -torch.inf)[torch.arange(len(rows)), rows] = -torch.inf
        same_class.append(_best(cosines, k))
    return _concatenate(same_class), _concatenate(other_classes)


def _chunks(queries: np.ndarray, candidates: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yield (first row, [rows, m] cosines) for as many queries at a time as CHUNK allows."""
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


def _concatenate(parts: list[Neighbours]) -> Neighbours:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
