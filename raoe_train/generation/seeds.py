"""Which of many sentences to begin chains with: some of each cluster (the ranking-sentences paper's section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raoe_train.encoders.embed import unit_rows
from raoe_train.encoders.frozen import embedder
from raoe_train.encoders.named import FrozenEncoder

if TYPE_CHECKING:
    from raoe_train.config import SeedsConfig


def select_seeds(sentences: Sequence[str], config: SeedsConfig) -> list[int]:
    """Positions of the chosen sentences, ascending: config.per_cluster of each of config.clusters clusters.

    Sentences are embedded by config.encoder. The same sentences, settings and machine give the same choice.

    Raises:
        ValueError: no encoder, or numbers that cannot be; see draw_from_clusters.
    """
    if not config.encoder:
        raise ValueError("seeds.encoder is missing: what embeds the sentences")
    _check(len(sentences), config.clusters, config.per_cluster)  # before hours of encoding
    encoder = FrozenEncoder(config.encoder, device=config.device, batch_size=config.batch_size)
    embeddings = embedder(encoder, "seeds.encoder")(sentences)
    return draw_from_clusters(embeddings, config.clusters, config.per_cluster, config.seed)


def draw_from_clusters(embeddings: np.ndarray, clusters: int, per_cluster: int, seed: int = 42) -> list[int]:
    """Rows of [n, d] embeddings, ascending: `per_cluster` drawn of each of `clusters` k-means clusters.

    Clusters are scikit-learn's MiniBatchKMeans of the embeddings' directions. A cluster of fewer sentences gives all it
    has, so there may be fewer than clusters x per_cluster.

    Raises:
        ValueError: fewer rows than clusters, or clusters or per_cluster below 1.
    """
    from sklearn.cluster import MiniBatchKMeans

    _check(len(embeddings), clusters, per_cluster)
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


def _check(sentences: int, clusters: int, per_cluster: int) -> None:
    for name, value in (("clusters", clusters), ("per_cluster", per_cluster)):
        if value < 1:
            raise ValueError(f"seeds.{name} must be at least 1, got {value}")
    if sentences < clusters:
        raise ValueError(f"{sentences} sentences cannot be in {clusters} clusters (seeds.clusters)")
