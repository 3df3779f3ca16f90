"""Source sentences of chains: all usable rows, or a few per cluster (section 4.1 of the ranking-sentences paper)."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.data.columns import RowProblem
from raoe_train.data.settings import Sentences
from raoe_train.data.tables import each_sentence
from raoe_train.encoders.embed import embeddings, unit_rows
from raoe_train.generation.instructions import BREAKS, LETTER
from raoe_train.settings import Seeds


def read_starts(data: Sentences, accept: Callable[[str], str | None]) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Read at most data.max_rows sentences. Return ([(row number from 1, sentence)], {reason: number of skipped rows}).

    Empty rows, duplicates, texts of several lines or without letters, and texts for which `accept` returns a reason are
    skipped. Raises ValueError for a row that is not a text (invalid UTF-8, a missing field) unless data.on_error is
    skip.
    """
    skipped: Counter[str] = Counter()
    starts: list[tuple[int, str]] = []
    seen: set[str] = set()
    for number, (place, text) in enumerate(each_sentence(str(data.input), data.columns), 1):
        if isinstance(text, RowProblem) and text.malformed:
            if data.on_error == "raise":
                raise ValueError(f"{place}: {text}; to skip and count such rows, use data.on_error skip")
            skipped["not a text"] += 1
            continue
        sentence = "" if isinstance(text, RowProblem) else text.strip()
        reason = (
            "empty" if not sentence
            else "duplicate" if sentence in seen
            else "more than one line" if BREAKS.search(sentence)
            else "no letters" if not LETTER.search(sentence)
            else accept(sentence)
        )  # fmt: skip
        seen.add(sentence)
        if reason is not None:
            skipped[reason] += 1
            continue
        starts.append((number, sentence))
        if len(starts) == data.max_rows:
            break
    if not starts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise ValueError(f"{data.input} has no usable sentences to start chains from ({reasons})")
    return starts, dict(skipped)


def acceptable(tokenizer: Any, longest: int) -> Callable[[str], str | None]:
    """Create the function `accept` of read_starts. It rejects texts with more than `longest` tokens, and texts with a
    special token, because this token could end the instruction."""
    special = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token) or "(?!)")

    def reason(sentence: str) -> str | None:
        if special.search(sentence):
            return "special token"
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        return "too long" if len(ids) > longest else None

    return reason


def check_clusters(sentences: Sequence[Any], seeds: Seeds) -> None:
    """Raise ValueError if there are more clusters than sentences."""
    if len(sentences) < seeds.clusters:
        raise ValueError(f"seeds.clusters is {seeds.clusters}, but there are only {len(sentences)} sentences: lower it")


def select_seeds(sentences: Sequence[str], seeds: Seeds) -> list[int]:
    """Select sentences by clustering, and return their indices in ascending order. Deterministic on one machine."""
    check_clusters(sentences, seeds)  # before hours of encoding
    encoder: Any = seeds.encoder
    # no cache: only this process encodes, and it would wait forever for the others' shards
    encoder = encoder if rank_and_world()[1] == 1 else replace(encoder, cache=None)
    vectors = embeddings(encoder, sentences, "seeds.encoder")
    return draw_from_clusters(vectors, seeds.clusters, seeds.per_cluster, seeds.seed)


def draw_from_clusters(vectors: np.ndarray, clusters: int, per_cluster: int, seed: int = 42) -> list[int]:
    """Cluster [n, d] embeddings by direction, and draw up to `per_cluster` from each cluster. Return sorted indices."""
    from sklearn.cluster import MiniBatchKMeans

    rows = unit_rows(np.asarray(vectors, dtype=np.float64))
    # init_size, the number of rows that k-means++ samples, must exceed the number of clusters
    size = max(1024, clusters)
    means = MiniBatchKMeans(clusters, random_state=seed, batch_size=size, init_size=3 * size, n_init=3)
    labels = means.fit_predict(rows)
    selection: list[int] = []
    for cluster in range(clusters):
        members = np.flatnonzero(labels == cluster)
        # one generator per cluster, so that the draw is independent of the other clusters' sizes
        sample = np.random.default_rng([seed, cluster]).permutation(members)[:per_cluster]
        selection.extend(sample.tolist())
    return sorted(selection)
