"""Compute embeddings with a loaded encoder, or with a frozen encoder and a cache, and find nearest neighbours."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raoe_train.inputs import recorded
from raoe_train.outputs import digest
from raoe_train.parts import read_parts, write_parts
from raoe_train.settings import CONDITIONAL, PROMPTS, Encoder

SORTED = 4096  # number of sentences that are tokenized and sorted by length together
CHUNK = 1 << 24  # number of cosines in memory at a time (64 MiB)
NONE = -1  # index of a missing neighbour
Embed = Callable[[Sequence[str]], np.ndarray]
Neighbours = tuple[np.ndarray, np.ndarray]
"""(indices, cosines), [n, k] int64 and float32, the nearest first. Missing neighbours at the end are NONE and -inf."""


def encode_sentences(model: Any, sentences: Sequence[str], batch_size: int = 64, **options: Any) -> np.ndarray:
    """Encode sentences in groups of similar length. Each distinct sentence is encoded only once. Return [n, d] float32.

    Args:
        model: a SentenceTransformer.
        batch_size: a group has at most batch_size x (length of the longest sentence) tokens.
        options: further arguments of the model's `encode`, such as prompt or task.

    Raise ValueError if there are no sentences, or if an embedding is not finite.
    """
    from raoe_train.encoders.lengths import encoding_by_length

    if not sentences:
        raise ValueError("sentences is empty: there is nothing to encode")
    places = {text: place for place, text in enumerate(dict.fromkeys(sentences))}
    training, bar = model.training, len(places) > SORTED  # no progress bar for a single step
    with encoding_by_length(model, batch_size):
        distinct = model.encode(list(places), batch_size=SORTED, show_progress_bar=bar, **options)
    model.train(training)
    distinct = np.asarray(distinct, dtype=np.float32)
    finite = np.isfinite(distinct).all(axis=1)
    if not finite.all():
        text = list(places)[int(np.argmin(finite))]
        raise ValueError(f"the encoder returns NaN or infinity for {np.sum(~finite)} sentences, such as {text!r}")
    return distinct[[places[text] for text in sentences]]


def prompt_of(model: Any, kind: str) -> str | None:
    """Return a model's prompt for queries or documents. If there is none, return the default prompt or None."""
    named = (model.prompts.get(name) for name in (*PROMPTS[kind], model.default_prompt_name))
    return next(filter(None, named), None)


def refuse_conditional(model: Any, name: str) -> None:
    """Raise ValueError if a SentenceTransformer's prompt contains {condition}: plain texts have no condition."""
    if CONDITIONAL in model.prompts:
        raise ValueError(f"{name}: only the jobs train and evaluate support a prompt with {{condition}} (C-STS)")


def print_cut(model: Any, texts: Iterable[str], source: str, prompt: str | None = None) -> int:
    """Print and return the number of texts that, together with the prompt, exceed a SentenceTransformer's
    max_seq_length. By default, `prompt` is the model's default prompt."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    limit = getattr(model, "max_seq_length", None)
    if limit is None or not hasattr(tokenizer, "num_special_tokens_to_add"):
        return 0
    prompt = model.prompts.get(model.default_prompt_name, "") if prompt is None else prompt
    room = limit - tokenizer.num_special_tokens_to_add(False) - 1
    texts, cut, total = iter(texts), 0, 0
    while counts := Counter(itertools.islice(texts, SORTED)):
        total += counts.total()
        # a text has at most as many tokens as bytes, plus SentencePiece's start marker
        maybe = [text for text in counts if len(prompt) + len(text) > room or len((prompt + text).encode()) > room]
        if maybe:
            tokens = tokenizer([prompt + text for text in maybe], truncation=False, verbose=False)["input_ids"]
            cut += sum(counts[text] for text, row in zip(maybe, tokens, strict=True) if len(row) > limit)
    if cut:
        print(f"{source}: {cut} of {total} texts are longer than max_seq_length {limit}, and are truncated", flush=True)
    return cut


def embedder(encoder: Encoder, role: str, texts: Iterable[str] = (), kind: str | None = None) -> Embed:
    """Create a function that encodes sentences with a frozen encoder. The first call loads the encoder, and prints how
    many of `texts` are truncated. Error messages start with `role`, such as "teacher". If the settings contain no
    prompt, the model's own prompt for this `kind` of text (a key of PROMPTS) is used. If the settings name a `second`
    encoder, the unit embeddings of both encoders are concatenated, so each cosine is the mean of both encoders'
    cosines."""
    if (second := getattr(encoder, "second", None)) is not None:
        first: Any = replace(encoder, second=None)  # type: ignore[call-arg]
        members = [embedder(each, role, texts, kind) for each in (first, second)]
        return lambda sentences: np.hstack([unit_rows(embed(sentences)) for embed in members])
    prompt, task = encoder.prompt, getattr(encoder, "task", None)
    options: dict[str, Any] = {} if task is None else {"task": task}
    if prompt is not None and "{" not in prompt:  # without {text}: encode puts the prompt before each text
        prompt, options["prompt"] = None, prompt
    size: Any = getattr(encoder, "batch_size", 64)

    @functools.cache
    def load() -> Any:
        from raoe_train.encoders.load import load_encoder

        model = load_encoder(replace(encoder, prompt=prompt))
        refuse_conditional(model, f"{role} {encoder.name}")
        if kind and encoder.prompt is None:
            options["prompt"] = prompt_of(model, kind)
        print_cut(model, texts, f"{role} {encoder.name}", options.get("prompt"))
        return model

    def embed(sentences: Sequence[str]) -> np.ndarray:
        model = load()
        try:
            return encode_sentences(model, sentences, size, **options)
        except ValueError as error:
            raise ValueError(f"{role} {encoder.name}: {error}") from None

    return embed


def remembered(encoder: Encoder, texts: Iterable[str], role: str) -> Embed:
    """Create an `embedder` that computes the embeddings of `texts` immediately and keeps them in memory."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    table, compute = embeddings(encoder, list(rows), role), embedder(encoder, role)

    def embed(sentences: Sequence[str]) -> np.ndarray:
        if all(text in rows for text in sentences):
            return table[[rows[text] for text in sentences]]
        return compute(sentences)

    return embed


def embeddings(encoder: Encoder, texts: Sequence[str], role: str) -> np.ndarray:
    """Encode texts as `embedder` does. Return [n, d] float32. If `encoder.cache` is set, the embeddings
    are stored as shards in this directory, in one folder for each encoder and list of texts."""
    if (folder := getattr(encoder, "cache", None)) is None:
        return embedder(encoder, role, texts)(texts)
    return read_parts(embedding_parts(encoder, texts, role, folder, sync=True))


def embedding_parts(
    encoder: Encoder, texts: Sequence[str], role: str, cache: str | Path, kind: str | None = None, sync: bool = False
) -> list[Path]:
    """Encode this process's share of the texts. Return the paths of the shards of all processes (see write_parts)."""
    embed = embedder(encoder, role, texts, kind)
    parts = {"model": recorded(encoder), "texts": digest(list(texts))}
    key = digest(parts | ({"kind": kind} if kind else {}))
    return write_parts(Path(cache).expanduser() / key[:16], texts, embed, f"{role} {encoder.name}", sync=sync)


def unit_rows(embeddings: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Scale the rows of [n, d] embeddings to norm 1, in a new array or in `out`. Zero rows stay zero."""
    unit = np.empty_like(embeddings) if out is None else out
    for start in range(0, len(unit), SORTED):  # in blocks, because norm copies its argument
        rows = embeddings[start : start + SORTED]
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        np.divide(rows, np.where(norms > 0, norms, np.inf), out=unit[start : start + SORTED])
    return unit


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the row-wise cosines of two [n, d] arrays, [n] float64 from -1 to 1. The cosine of a zero row is 0."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    quotients = np.divide((a * b).sum(axis=1), norms, out=np.zeros(len(a)), where=norms > 0)
    return np.clip(quotients, -1, 1)  # rounding can give 1.0000000000000002


def nearest(queries: np.ndarray, texts: np.ndarray, k: int, row_of: np.ndarray | None = None) -> Neighbours:
    """Find the k nearest candidates for each query, or all candidates if there are fewer than k. All rows have norm 1.
    Candidate i is `texts[i]`, or `texts[row_of[i]]` if row_of is given. With row_of, candidates with equal texts share
    an embedding, so their cosines are equal."""
    chunks = (cosines if row_of is None else cosines[:, row_of] for _, cosines in _chunks(queries, texts))
    return _concatenate([_best(cosines, k) for cosines in chunks])


def nearest_by_class(unit: np.ndarray, classes: np.ndarray, k: int) -> tuple[Neighbours, Neighbours]:
    """For each row, find the k nearest other rows of the same class, and the k nearest rows among all other classes.
    `unit` contains [n, d] rows of norm 1, and `classes` contains their classes, [n] integers."""
    import torch

    class_of = torch.from_numpy(classes)
    same_class, other_classes = [], []
    for start, cosines in _chunks(unit, unit):
        is_same = class_of[start : start + len(cosines), None] == class_of
        other_classes.append(_best(cosines.masked_fill(is_same, -torch.inf), k))
        cosines.masked_fill_(~is_same, -torch.inf).diagonal(start).fill_(-torch.inf)
        same_class.append(_best(cosines, k))
    return _concatenate(same_class), _concatenate(other_classes)


def _chunks(queries: np.ndarray, candidates: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Compute up to CHUNK cosines at a time. Yield (index of a chunk's first query, the chunk's [rows, m] cosines)."""
    import torch

    first, second = (torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32)) for rows in (queries, candidates))
    rows = max(1, CHUNK // max(1, len(candidates)))
    for start in range(0, len(queries), rows):
        yield start, first[start : start + rows] @ second.T


def _best(cosines: Any, k: int) -> Neighbours:
    """Return (columns, cosines) of the k highest cosines in each row. Break ties by column, lowest index first."""
    values, places = cosines.topk(min(k, cosines.shape[1]), dim=1)
    last = values[:, -1:]
    tied = ((cosines >= last).sum(dim=1) > places.shape[1]) & ~last[:, 0].isneginf()  # topk picks any of equal values
    places[tied] = cosines[tied].sort(dim=1, descending=True, stable=True).indices[:, : places.shape[1]]
    places = places.sort(dim=1).values
    values, order = cosines.gather(1, places).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order)
    places = places.masked_fill(values.isneginf(), NONE).numpy()
    short = ((0, 0), (0, k - places.shape[1]))
    return np.pad(places, short, constant_values=NONE), np.pad(values.numpy(), short, constant_values=-np.inf)


def _concatenate(parts: list[Neighbours]) -> Neighbours:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
