"""Reranking: mean average precision and mean reciprocal rank of each query's candidates, ranked by cosine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.data.retrieval import read_candidates
from raoe_train.encoders.embed import cosines
from raoe_train.evaluation.finding import NoSuchTask, find_task
from raoe_train.evaluation.mteb import read_mteb
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import SUITES, EmbeddingTask, Reading, Task

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class RerankTask(EmbeddingTask):
    """Queries with positive and negative candidates; see score."""

    kind = "rerank"
    main = "map"
    queries: Dataset

    def content(self) -> Any:
        return list(self.queries)

    def sentences(self) -> list[str]:
        return [text for query in self.queries for text in (query["query"], *query["positive"], *query["negative"])]

    def score(self, embeddings: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
        """{"map", "mrr"} x100 over all candidates of a query, and "queries", how many; with each query's precision.

        Of candidates with equal cosines, negatives come first: an encoder that gives all texts one embedding gets
        the lowest score, not that of the file's order.
        """
        precisions, ranks = [], []
        start = 0
        for query in self.queries:
            end = start + 1 + len(query["positive"]) + len(query["negative"])
            candidates = embeddings[start + 1 : end]
            similarity = cosines(np.broadcast_to(embeddings[start], candidates.shape), candidates)
            relevant = np.arange(len(candidates)) < len(query["positive"])
            ranked = relevant[np.lexsort((relevant, -similarity))]
            places = np.flatnonzero(ranked) + 1
            precisions.append(np.mean(np.arange(1, len(places) + 1) / places))
            ranks.append(1 / places[0])
            start = end
        found = {"map": 100 * float(np.mean(precisions)), "mrr": 100 * float(np.mean(ranks))}
        return {**found, "queries": len(self.queries)}, Outcomes(100 * np.array(precisions))


def read_rerank(name: str, reading: Reading) -> Task:
    """The queries of a task; MTEB's reranking sets (SUITES["rerank"]) come through mteb where data.dir has no file."""
    known = name in SUITES["rerank"]
    if known and not reading.data_dir:
        return read_mteb(name, reading)
    try:
        source = find_task(name, reading.data_dir, "rerank")
    except NoSuchTask:
        if known:
            return read_mteb(name, reading)
        raise
    return RerankTask(read_candidates(source, columns=reading.columns, on_error=reading.on_error))
