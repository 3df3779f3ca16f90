"""Semantic textual similarity: correlation of an encoder's cosines with human scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from raoe_train.data.conditional import read_scored
from raoe_train.encoders.embed import cosines, rounding
from raoe_train.evaluation.finding import find_source
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import Reading, Task, evaluate_tasks, mean_of_all

if TYPE_CHECKING:
    from datasets import Dataset


def read_sts(name: str, reading: Reading) -> Task:
    """The scored pairs of a task; with a {condition} in the prompt, those of a C-STS file (see read_scored)."""
    source = find_source(name, reading.data_dir, "sts")
    return of_pairs(read_scored(source, reading.prompt, columns=reading.columns, on_error=reading.on_error))


def of_pairs(pairs: Dataset) -> Task:
    """The task of sentence1, sentence2 and score, and perhaps subset."""
    columns = pairs.to_dict()
    score = partial(correlations, scores=np.asarray(columns["score"]), subsets=np.asarray(columns.get("subset", [])))
    return Task("sts", "spearman", columns, [*columns["sentence1"], *columns["sentence2"]], score)


def correlations(embeddings: np.ndarray, scores: np.ndarray, subsets: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
    """{"spearman", "pearson", "pairs"}, correlations x100 of cosines and scores over all pairs together (the "all" of
    Gao et al. 2021, Appendix B), and the cosines with their scores. Of several subsets also "subsets", {name: the same
    of it}, and "mean", unweighted, of their correlations."""
    similarity, noise = cosines(*np.split(embeddings, 2)), rounding(embeddings)

    def measured(chosen: np.ndarray) -> dict[str, Any]:
        return {**correlate(similarity[chosen], scores[chosen], noise), "pairs": int(chosen.sum())}

    result = measured(np.full(len(scores), True))
    parts = {name: measured(subsets == name) for name in dict.fromkeys(subsets.tolist())}
    if len(parts) > 1:
        means = {metric: mean_of_all([of[metric] for of in parts.values()]) for metric in ("spearman", "pearson")}
        result |= {"mean": means, "subsets": parts}
    return result, Outcomes(similarity, scores)


def correlate(similarity: np.ndarray, scores: np.ndarray, noise: float = 0.0) -> dict[str, float | None]:
    """{"spearman", "pearson"} x100 of two vectors [n]; None where all values of one are equal, or similarities differ
    by no more than `noise`, their rounding."""
    from scipy import stats

    if np.ptp(similarity) <= noise or np.ptp(scores) == 0:
        return {"spearman": None, "pearson": None}
    found = {"spearman": stats.spearmanr(similarity, scores), "pearson": stats.pearsonr(similarity, scores)}
    return {name: 100 * float(of.statistic) for name, of in found.items()}


class StsEvaluator(SentenceEvaluator):
    """of_pairs for a trainer: NAME_spearman_cosine, what the best model is chosen by, and NAME_pearson_cosine, from -1
    to 1; NaN where they are undefined. Of several sets by name these are their means, beside NAME_SET_spearman_cosine
    and NAME_SET_pearson_cosine of each."""

    def __init__(self, pairs: Dataset | Mapping[str, Dataset], batch_size: int, name: str) -> None:
        super().__init__()
        sets = pairs if isinstance(pairs, Mapping) else {name: pairs}
        self.tasks = {each: of_pairs(its) for each, its in sets.items()}
        self.batch_size, self.name = batch_size, name
        self.primary_metric = f"{name}_spearman_cosine"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        found = evaluate_tasks(model, self.tasks, self.batch_size)["tasks"]
        named: dict[str, float] = {}
        for metric in ("spearman", "pearson"):
            of = {each: math.nan if its[metric] is None else its[metric] / 100 for each, its in found.items()}
            named[f"{self.name}_{metric}_cosine"] = sum(of.values()) / len(of)
            if len(of) > 1:
                named |= {f"{self.name}_{each}_{metric}_cosine": value for each, value in of.items()}
        self.store_metrics_in_model_card_data(model, named, epoch, steps)
        return named
