"""Semantic textual similarity: correlation of an encoder's cosines with human scores."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.data.conditional import read_scored
from raoe_train.encoders.embed import cosines
from raoe_train.evaluation.finding import find_source
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import Reading, Task, mean_of_all

if TYPE_CHECKING:
    from datasets import Dataset


def read_sts(name: str, reading: Reading) -> Task:
    """The scored pairs of a task; with a {condition} in the prompt, those of a C-STS file (see read_scored)."""
    source = find_source(name, reading.data_dir, "sts")
    pairs = read_scored(source, reading.prompt, columns=reading.columns, on_error=reading.on_error)
    if len(set(pairs["score"][:])) < 2:
        where = source if isinstance(source, str) else name
        raise ValueError(f"{where}: all scores are equal, so no correlation is defined")
    return of_pairs(pairs)


def of_pairs(pairs: Dataset) -> Task:
    """The task of sentence1, sentence2 and score, and perhaps subset."""
    columns = pairs.to_dict()
    score = partial(correlations, scores=np.asarray(columns["score"]), subsets=np.asarray(columns.get("subset", [])))
    return Task("sts", "spearman", columns, [*columns["sentence1"], *columns["sentence2"]], score)


def correlations(embeddings: np.ndarray, scores: np.ndarray, subsets: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
    """{"spearman", "pearson", "pairs"}, correlations x100 of cosines and scores over all pairs together (the "all" of
    Gao et al. 2021, Appendix B), and the cosines with their scores. Of several subsets also "subsets", {name: the same
    of it}, and "mean", unweighted, of their correlations."""
    similarity = cosines(*np.split(embeddings, 2))

    def measured(chosen: np.ndarray) -> dict[str, Any]:
        return {**correlate(similarity[chosen], scores[chosen]), "pairs": int(chosen.sum())}

    result = measured(np.full(len(scores), True))
    parts = {name: measured(subsets == name) for name in dict.fromkeys(subsets.tolist())}
    if len(parts) > 1:
        means = {metric: mean_of_all([of[metric] for of in parts.values()]) for metric in ("spearman", "pearson")}
        result |= {"mean": means, "subsets": parts}
    return result, Outcomes(similarity, scores)


def correlate(similarity: np.ndarray, scores: np.ndarray) -> dict[str, float | None]:
    """{"spearman", "pearson"} x100 of two vectors [n]; None where all values of one are equal."""
    from scipy import stats

    if np.ptp(similarity) == 0 or np.ptp(scores) == 0:
        return {"spearman": None, "pearson": None}
    found = {"spearman": stats.spearmanr(similarity, scores), "pearson": stats.pearsonr(similarity, scores)}
    return {name: 100 * float(of.statistic) for name, of in found.items()}
