"""Reranking: mean average precision and mean reciprocal rank of each query's candidates, ranked by cosine."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from raoe_train.data.retrieval import read_candidates
from raoe_train.encoders.embed import cosines
from raoe_train.evaluation.finding import NoSuchTask, find_task
from raoe_train.evaluation.mteb import read_mteb
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import SUITES, Reading, Task


def read_rerank(name: str, reading: Reading) -> Task:
    """The queries of a task; MTEB's reranking sets (SUITES["rerank"]) come through mteb where data.dir has no file."""
    try:
        source = find_task(name, reading.data_dir, "rerank")
    except NoSuchTask:
        if name not in SUITES["rerank"]:
            raise
        return read_mteb(name, reading)
    queries = list(read_candidates(source, columns=reading.columns, on_error=reading.on_error))
    texts = [text for query in queries for text in (query["query"], *query["positive"], *query["negative"])]
    return Task("rerank", "map", queries, texts, partial(precision, queries=queries))


def precision(embeddings: np.ndarray, queries: list[dict[str, Any]]) -> tuple[dict[str, Any], Outcomes]:
    """{"map", "mrr"} x100 over all candidates of a query, and "queries", how many; with each query's precision."""
    precisions, ranks = [], []
    ends = np.cumsum([1 + len(query["positive"]) + len(query["negative"]) for query in queries])
    for query, texts in zip(queries, np.split(embeddings, ends[:-1]), strict=True):
        candidates = texts[1:]
        similarity = cosines(np.broadcast_to(texts[0], candidates.shape), candidates)
        relevant = np.arange(len(candidates)) < len(query["positive"])
        # of equal cosines negatives come first: an encoder with one embedding for all texts gets the lowest score
        ranked = relevant[np.lexsort((relevant, -similarity))]
        places = np.flatnonzero(ranked) + 1
        precisions.append(np.mean(np.arange(1, len(places) + 1) / places))
        ranks.append(1 / places[0])
    found = {"map": 100 * float(np.mean(precisions)), "mrr": 100 * float(np.mean(ranks))}
    return {**found, "queries": len(queries)}, Outcomes(100 * np.array(precisions))
