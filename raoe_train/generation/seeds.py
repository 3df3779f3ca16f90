"""The sentences that chains begin with: usable rows of a source, or some of each cluster (the paper's section 4.1)."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.config import PositiveInt, Seed
from raoe_train.data.settings import Sentences
from raoe_train.data.tables import each_sentence
from raoe_train.encoders.embed import embeddings, unit_rows
from raoe_train.encoders.settings import FrozenEncoder, settings_said
from raoe_train.generation.instructions import BREAKS, LETTER


@dataclass
class Seeds:
    """Begin with some sentences of each k-means cluster instead of with all.

    Args:
        encoder: encoder whose embeddings are clustered; by default all sentences are used
        clusters: k-means clusters
        per_cluster: sentences drawn from each
        seed: seed of the clusters and the draw
    """

    encoder: FrozenEncoder | None = None
    clusters: PositiveInt = 1000
    per_cluster: PositiveInt = 20
    seed: Seed = 42

    def effective(self) -> dict[str, Any] | None:
        """The settings that have a part in what is chosen, as plain values; None without an encoder."""
        if self.encoder is None:
            return None
        return {**asdict(self), "encoder": settings_said(self.encoder)}


def read_starts(data: Sentences, accept: Callable[[str], str | None]) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """([(number of the row from 1, sentence)] of data.input, data.max_rows at most, {reason: skipped rows}).

    Skipped are empty rows, duplicates, more than one line, no letters, and what `accept` has a reason against. A row
    that is no text (bytes that are not UTF-8, a missing field) is an error, unless data.on_error is skip.
    """
    if not data.input:
        raise ValueError("data.input is missing: the sentences to begin with")
    skipped: Counter[str] = Counter()
    kept: list[tuple[int, str]] = []
    seen: set[str] = set()
    for number, (where, text, problem) in enumerate(each_sentence(data.input, data.columns), 1):
        if problem is not None and problem != "blank line":
            if data.on_error == "raise":
                raise ValueError(f"{where}: {problem}; data.on_error skip leaves such rows out and counts them")
            skipped["not a text"] += 1
            continue
        sentence = text.strip()
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
        kept.append((number, sentence))
        if len(kept) == data.max_rows:
            break
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise ValueError(f"{data.input}: there are no sentences to begin with ({why})")
    return kept, dict(skipped)


def acceptable(tokenizer: Any, longest: int) -> Callable[[str], str | None]:
    """The `accept` of read_starts: no special token, which would end the instruction or speak for the model, and at
    most `longest` tokens."""
    special = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token) or "(?!)")

    def reason(sentence: str) -> str | None:
        if special.search(sentence):
            return "special token"
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        return "too long" if len(ids) > longest else None

    return reason


def check_clusters(sentences: Sequence[Any], seeds: Seeds) -> None:
    """ValueError for more clusters than sentences."""
    if len(sentences) < seeds.clusters:
        raise ValueError(f"{len(sentences)} sentences cannot be in {seeds.clusters} clusters (seeds.clusters)")


def select_seeds(sentences: Sequence[str], seeds: Seeds) -> list[int]:
    """Positions of the chosen sentences, ascending. The same sentences, settings and machine give the same choice."""
    check_clusters(sentences, seeds)  # before hours of encoding
    encoder: Any = seeds.encoder
    # of several processes one chooses, alone: the others' shards of a cache would never come
    encoder = encoder if rank_and_world()[1] == 1 else replace(encoder, cache=None)
    vectors = embeddings(encoder, sentences, "seeds.encoder")
    return draw_from_clusters(vectors, seeds.clusters, seeds.per_cluster, seeds.seed)


def draw_from_clusters(vectors: np.ndarray, clusters: int, per_cluster: int, seed: int = 42) -> list[int]:
    """Rows of [n, d] embeddings, ascending: of each of `clusters` clusters of directions `per_cluster`, or all."""
    from sklearn.cluster import MiniBatchKMeans

    rows = unit_rows(np.asarray(vectors, dtype=np.float64))
    # k-means++ looks at init_size rows, of which there must be some for each cluster
    size = max(1024, clusters)
    means = MiniBatchKMeans(clusters, random_state=seed, batch_size=size, init_size=3 * size, n_init=3)
    labels = means.fit_predict(rows)
    chosen: list[int] = []
    for cluster in range(clusters):
        members = np.flatnonzero(labels == cluster)
        # a generator of its own, so that one cluster's size has no say in another's draw
        drawn = np.random.default_rng([seed, cluster]).permutation(members)[:per_cluster]
        chosen.extend(drawn.tolist())
    return sorted(chosen)
