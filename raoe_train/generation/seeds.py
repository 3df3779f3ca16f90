"""Which of many sentences to begin chains with: some of each cluster (the ranking-sentences paper's section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.config import PositiveInt, Seed
from raoe_train.encoders.embed import embeddings, unit_rows
from raoe_train.encoders.settings import FrozenEncoder, settings_said


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


def select_seeds(sentences: Sequence[str], seeds: Seeds) -> list[int]:
    """Positions of the chosen sentences, ascending: seeds.per_cluster of each of seeds.clusters clusters, embedded by
    seeds.encoder. The same sentences, settings and machine give the same choice."""
    if len(sentences) < seeds.clusters:  # before hours of encoding
        raise ValueError(f"{len(sentences)} sentences cannot be in {seeds.clusters} clusters (seeds.clusters)")
    encoder: Any = seeds.encoder
    # of several processes one chooses, alone: the others' shards of a cache would never come
    encoder = encoder if rank_and_world()[1] == 1 else replace(encoder, cache=None)
    return draw_from_clusters(
        embeddings(encoder, sentences, "seeds.encoder"), seeds.clusters, seeds.per_cluster, seeds.seed
    )


def draw_from_clusters(embeddings: np.ndarray, clusters: int, per_cluster: int, seed: int = 42) -> list[int]:
    """Rows of [n, d] embeddings, ascending: `per_cluster` drawn of each of `clusters` k-means clusters.

    Clusters are scikit-learn's MiniBatchKMeans of the embeddings' directions. A cluster of fewer sentences gives all it
    has, so there may be fewer than clusters x per_cluster.
    """
    from sklearn.cluster import MiniBatchKMeans

    rows = unit_rows(np.asarray(embeddings, dtype=np.float64))
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
