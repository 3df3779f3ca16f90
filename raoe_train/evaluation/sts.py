"""Semantic textual similarity: correlation between an encoder's cosine similarities and human scores."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from raoe_train.data.pairs import read_scored
from raoe_train.encoders.embed import cosines
from raoe_train.evaluation.tasks import Outcomes, Reading, Task, find_task, mean_of_all
from raoe_train.outputs import read_json
from raoe_train.settings import CONDITIONAL, Model


def read_sts(name: str, reading: Reading) -> Task:
    """Create an sts task from its scored pairs (see read_scored)."""
    return of_pairs(read_scored(find_task(name, reading.data_dir), reading.prompt, **reading.rows))


def of_pairs(pairs: Any) -> Task:
    """Create an sts task from a Dataset with the columns sentence1, sentence2, score and, optionally, subset."""
    columns = pairs.to_dict()
    score = partial(correlations, scores=np.asarray(columns["score"]), subsets=np.asarray(columns.get("subset", [])))
    return Task("sts", "spearman", [*columns["sentence1"], *columns["sentence2"]], score)


def correlations(embeddings: np.ndarray, scores: np.ndarray, subsets: np.ndarray) -> tuple[dict[str, Any], Outcomes]:
    """Return ({"spearman", "pearson", "pairs"}, Outcomes with cosines and scores). The correlations, x100, are computed
    over all pairs together ("all" in Gao et al. 2021, Appendix B). With several subsets, the dict also contains
    "subsets" ({name: the same three metrics}) and "mean" (the unweighted mean of the subsets' correlations)."""
    similarity = cosines(*np.split(embeddings, 2))

    def measure(rows: np.ndarray) -> dict[str, Any]:
        return {**correlate(similarity[rows], scores[rows]), "pairs": int(rows.sum())}

    result = measure(np.full(len(scores), True))
    parts = {name: measure(subsets == name) for name in dict.fromkeys(subsets.tolist())}
    if len(parts) > 1:
        means = {metric: mean_of_all([part[metric] for part in parts.values()]) for metric in ("spearman", "pearson")}
        result |= {"mean": means, "subsets": parts}
    return result, Outcomes(similarity, scores)


def correlate(similarity: np.ndarray, scores: np.ndarray) -> dict[str, float | None]:
    """Return {"spearman", "pearson"} (correlations x100) of two vectors [n]. If a vector is constant, both are None."""
    if np.ptp(similarity) == 0 or np.ptp(scores) == 0:
        return {"spearman": None, "pearson": None}
    spearman, pearson = stats.spearmanr(similarity, scores), stats.pearsonr(similarity, scores)
    return {"spearman": 100 * float(spearman.statistic), "pearson": 100 * float(pearson.statistic)}


def conditional_prompt(model: Any) -> str | None:
    """Return a model's prompt for C-STS: the prompt in its settings, else the prompt saved with it, else None."""
    if not isinstance(model, Model):
        prompts = model.prompts
    elif model.prompt is not None:
        return model.prompt
    else:
        path = Path(model.name).expanduser() / "config_sentence_transformers.json"
        prompts = read_json(path).get("prompts")  # if the file is damaged, load_encoder raises an error
    prefix = prompts.get(CONDITIONAL) if isinstance(prompts, dict) else None
    return prefix + "{text}" if isinstance(prefix, str) else None
