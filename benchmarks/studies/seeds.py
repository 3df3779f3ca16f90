"""Select source sentences for chains of ranking sentences: a few from each k-means cluster of their embeddings (section
4.1 of the ranking-sentences paper: 20 from each of 1,000 clusters).

    python -m benchmarks.studies.seeds SENTENCES.txt --model ENCODER --output selected.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np


def draw_from_clusters(vectors: np.ndarray, clusters: int, per_cluster: int, seed: int = 42) -> list[int]:
    """Cluster [n, d] embeddings by direction, and draw up to `per_cluster` from each cluster. Return sorted indices."""
    from sklearn.cluster import MiniBatchKMeans

    rows = np.asarray(vectors, dtype=np.float64)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    # init_size, the number of rows that k-means++ samples, must exceed the number of clusters
    size = max(1024, clusters)
    means = MiniBatchKMeans(clusters, random_state=seed, batch_size=size, init_size=3 * size, n_init=3)
    labels = means.fit_predict(rows)
    selection: list[int] = []
    for cluster in range(clusters):
        members = np.flatnonzero(labels == cluster)
        # one generator per cluster, so that the draw is independent of the other clusters' sizes
        selection.extend(np.random.default_rng([seed, cluster]).permutation(members)[:per_cluster].tolist())
    return sorted(selection)


def main(arguments: list[str] | None = None) -> None:
    from sentence_transformers import SentenceTransformer

    parser = argparse.ArgumentParser("python -m benchmarks.studies.seeds", allow_abbrev=False)
    parser.add_argument("sentences", type=Path, help="text file with one sentence per line")
    parser.add_argument("--model", required=True, help="the encoder")
    parser.add_argument("--output", type=Path, required=True, help="text file for the selected sentences")
    parser.add_argument("--clusters", type=int, default=1000, help="number of clusters [1000]")
    parser.add_argument("--per_cluster", type=int, default=20, help="sentences to draw from each cluster [20]")
    parser.add_argument("--seed", type=int, default=42, help="seed for clustering and drawing [42]")
    given: Any = parser.parse_args(arguments)
    lines = [*dict.fromkeys(filter(None, map(str.strip, given.sentences.read_text("utf-8").splitlines())))]
    if len(lines) < given.clusters:
        raise SystemExit(f"{given.sentences} has only {len(lines)} distinct sentences: lower --clusters")
    vectors = SentenceTransformer(given.model).encode(lines, show_progress_bar=True)
    chosen = draw_from_clusters(vectors, given.clusters, given.per_cluster, given.seed)
    given.output.write_text("".join(f"{lines[place]}\n" for place in chosen), encoding="utf-8")
    print(f"{len(chosen)} of {len(lines)} sentences: {given.output}")


if __name__ == "__main__":
    main()
