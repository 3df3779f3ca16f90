"""Semantic textual similarity: correlation of an encoder's cosines with human scores."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.data.conditional import read_scored
from raoe_train.encoders.embed import cosines
from raoe_train.evaluation.finding import find_source
from raoe_train.evaluation.outcomes import Outcomes
from raoe_train.evaluation.tasks import EmbeddingTask, Reading, mean_of_all

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class StsTask(EmbeddingTask):
    """Scored pairs; see score."""

    kind = "sts"
    main = "spearman"
    pairs: Dataset

    def content(self) -> Any:
        return self.pairs.to_dict()

    def sentences(self) -> list[str]:
        return [*self.pairs["sentence1"][:], *self.pairs["sentence2"][:]]

    def score(self, embeddings: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
        """{"spearman", "pearson", "pairs"}: correlations, x100, of pair cosines and scores over all pairs of the set
        together, the "all" setting of Gao et al. 2021, Appendix B; and the cosines with their scores.

        Where the pairs are of several subsets there are "subsets", {name: the same of it}, and "mean", unweighted, of
        their correlations. An undefined correlation, as all cosines or all scores are equal, is None, its mean too.
        """
        similarity = cosines(embeddings[: len(self.pairs)], embeddings[len(self.pairs) :])
        scores = np.asarray(self.pairs["score"][:])
        result: dict[str, Any] = {**correlate(similarity, scores), "pairs": len(scores)}
        names = np.asarray(self.pairs["subset"][:] if "subset" in self.pairs.column_names else [])
        subsets: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(names.tolist()):
            chosen = names == name
            subsets[name] = {**correlate(similarity[chosen], scores[chosen]), "pairs": int(chosen.sum())}
        if len(subsets) > 1:
            means = {metric: mean_of_all([of[metric] for of in subsets.values()]) for metric in ("spearman", "pearson")}
            result |= {"mean": means, "subsets": subsets}
        return result, Outcomes(similarity, scores)


def read_sts(name: str, reading: Reading) -> StsTask:
    """The scored pairs of a task: its test split where it has splits; NAME#dev another one; NAME-all all pairs. With
    a {condition} in the prompt, a C-STS file; see read_scored. ValueError for equal scores everywhere."""
    source = find_source(name, reading.data_dir, "sts")
    pairs = read_scored(source, reading.prompt, columns=reading.columns, on_error=reading.on_error)
    if len(set(pairs["score"][:])) < 2:
        where = source if isinstance(source, str) else name
        raise ValueError(f"{where}: all scores are equal, so no correlation is defined")
    return StsTask(pairs)


def correlate(similarity: np.ndarray, scores: np.ndarray) -> dict[str, float | None]:
    """{"spearman", "pearson"} x100 of two vectors [n]; None where all values of one are equal."""
    from scipy import stats

    if np.ptp(similarity) == 0 or np.ptp(scores) == 0:
        return {"spearman": None, "pearson": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        pearson = 100 * float(stats.pearsonr(similarity, scores).statistic)
    return {"spearman": 100 * float(stats.spearmanr(similarity, scores).statistic), "pearson": pearson}
