"""Functions that read a data source into a dataset with the columns that a loss needs. `losses/collators.py` refers to
these functions by name. Each function takes a source, the section `data` with this source's labels and score_scale,
model.prompt, and whether to read NLI labels."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyarrow.compute import min_max

from raoe_train.data.pairs import TEXTS, conditional_table, is_conditional, pair_table
from raoe_train.data.rows import list_table, row_table
from raoe_train.data.sources import Table
from raoe_train.settings import Data

logger = logging.getLogger(__name__)


def table_of(source: str, data: Data, make: Callable[..., Table], *unread: str, **options: Any) -> Table:
    """Read a source with the function `make`, ignoring the columns named in `unread`."""
    columns = {**data.columns, **dict.fromkeys(unread, "none")}
    return make(source, columns=columns, on_error=data.on_error, **options)


def scored_pairs(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read the columns sentence1, sentence2, score and, if `with_label`, label. If the prompt contains {condition},
    read the source as a C-STS file."""
    if is_conditional(prompt):
        if with_label:
            raise ValueError("C-STS has no NLI labels: use RankMarginLoss or CoSENTLoss, or set loss.gate to score")
        return table_of(source, data, conditional_table, prompt=prompt)
    names = [*TEXTS, "score", *(["label"] if with_label else [])]
    options = {"names": names, "labels": data.labels, "score_scale": data.score_scale or None}
    return table_of(source, data, pair_table, **options)


def ranked_pairs(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read scored pairs. If all scores are equal, raise ValueError (or warn if the loss also uses labels)."""
    dataset, counts = scored_pairs(source, data, prompt, with_label)
    scores = min_max(dataset.data.column("score")).as_py()
    if scores["min"] == scores["max"]:
        problem = f"{source}: all {len(dataset)} scores are {scores['min']:g}, so no pair ranks above another"
        if not with_label:
            raise ValueError(f"{problem}: the loss would be 0")
        logger.warning("%s: only the labels have an effect", problem)
    return dataset, counts


def cosines(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read scored pairs whose scores are targets for cosines. Map scores from data.score_scale to the range 0 … 1.
    Scores on a scale that starts below 0 and lies within -1 … 1 (the default) are not changed."""
    dataset, counts = scored_pairs(source, data, prompt, with_label)
    scores = dataset["score"][:]
    lowest, highest = data.score_scale or (-1, 1)
    if not -1 <= lowest < 0 < highest <= 1:
        unit = [(score - lowest) / (highest - lowest) for score in scores]
        return dataset.remove_columns("score").add_column("score", unit), counts
    if min(scores) < -1 or max(scores) > 1:
        problem = f"CosineSimilarityLoss needs scores from -1 to 1, got {min(scores)} to {max(scores)}"
        raise ValueError(f"{source}: {problem}: declare their range with data.score_scale LOWEST HIGHEST")
    return dataset, counts


def rows(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    options = {"labels": data.labels, "neutral": data.neutral, "pairing": data.pairing}
    return table_of(source, data, row_table, num_negatives=data.num_negatives, **options)


def triplets(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read rows that all have exactly one negative."""
    dataset, counts = rows(source, data, prompt, with_label)
    names = {*dataset.column_names} - {"neutral"}
    if names != {"anchor", "positive", "negative"} or dataset.data.column("negative").null_count:
        advice = "for other numbers of negatives, use InfoNCELoss"
        raise ValueError(f"{source}: the loss needs exactly one negative in every row: {advice}")
    return dataset, counts


def one_negative(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    if data.neutral:
        raise ValueError("TripletLoss cannot use data.neutral: remove it, or use InfoNCELoss or AnglEContrastiveLoss")
    return triplets(source, data, prompt, with_label)


def two_classes(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read pairs with the labels 1 (similar) and 0 (dissimilar)."""
    data = replace(data, labels=data.labels or {"0": 0, "1": 1})
    return _labelled(source, data, 2, "labels must be 1 (similar) or 0 (dissimilar)")


def nli_classes(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    return _labelled(source, data, 3, "classes must be 0, 1 or 2")


def _labelled(source: str, data: Data, count: int, rule: str) -> Table:
    options: dict[str, Any] = {"names": [*TEXTS, "label"], "labels": data.labels}
    dataset, counts = table_of(source, data, pair_table, "score", **options)
    if beyond := sorted({*dataset.unique("label")} - {*range(count)}):
        raise ValueError(f"{source}: {rule}, got {', '.join(map(str, beyond))}")
    return dataset, counts


def lists(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    return list_table(source, on_error=data.on_error)
