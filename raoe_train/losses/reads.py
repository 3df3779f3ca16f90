"""The training data of each loss: how to read a source into a dataset, and the collator that builds batches."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyarrow.compute import min_max
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from raoe_train.data.pairs import conditional_table, is_conditional, pair_table
from raoe_train.data.rows import list_table, row_table
from raoe_train.losses.collators import ListCollator, RowCollator, ScoreLabelCollator, TextCollator
from raoe_train.settings import Data

logger = logging.getLogger(__name__)
Table = tuple[Any, dict[str, Any]]
"""(datasets.Dataset, counts), with counts such as {"dropped": {reason: number of rows}}."""
SENTENCES = ["sentence1", "sentence2"]


@dataclass(frozen=True)
class Reads:
    """The kind of training data that a loss needs."""

    name: str  # for messages, such as "triplets"
    # arguments: source; data with this source's labels and score_scale; model.prompt; whether to read NLI labels
    read: Callable[[str, Data, str | None, bool], Table]
    collator: type[SentenceTransformerDataCollator] = RowCollator


def table_of(source: str, data: Data, make: Callable[..., Table], *unread: str, **options: Any) -> Table:
    """Read a source with the function `make`, and ignore the columns `unread` of the source."""
    columns = {**data.columns, **dict.fromkeys(unread, "none")}
    return make(source, columns=columns, on_error=data.on_error, **options)


def _scored_pairs(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read the columns sentence1, sentence2, score and, if `with_label`, label. If the prompt has a {condition}, read
    the source as a C-STS file."""
    if is_conditional(prompt):
        if with_label:
            raise ValueError("C-STS has no NLI labels: use RankMarginLoss or CoSENTLoss, or set loss.gate to score")
        return table_of(source, data, conditional_table, prompt=prompt)
    names = [*SENTENCES, "score", *(["label"] if with_label else [])]
    options = {"names": names, "labels": data.labels, "score_scale": data.score_scale or None}
    return table_of(source, data, pair_table, **options)


def _ranked_pairs(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read scored pairs. If all scores are equal, raise ValueError, or warn if the loss also uses labels."""
    dataset, counts = _scored_pairs(source, data, prompt, with_label)
    scores = min_max(dataset.data.column("score")).as_py()
    if scores["min"] == scores["max"]:
        problem = f"{source}: all {len(dataset)} scores are {scores['min']:g}, so no pair ranks above another"
        if not with_label:
            raise ValueError(f"{problem}: the loss would be 0")
        logger.warning("%s: only the labels have an effect", problem)
    return dataset, counts


def _cosines(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read scored pairs whose scores are targets for cosines. Scores are mapped from data.score_scale to 0 … 1. But if
    the scale starts below 0 and lies within -1 … 1 (the default), scores are not changed."""
    dataset, counts = _scored_pairs(source, data, prompt, with_label)
    scores = dataset["score"][:]
    lowest, highest = data.score_scale or (-1, 1)
    if not -1 <= lowest < 0 < highest <= 1:
        unit = [(score - lowest) / (highest - lowest) for score in scores]
        return dataset.remove_columns("score").add_column("score", unit), counts
    if min(scores) < -1 or max(scores) > 1:
        problem = f"CosineSimilarityLoss needs scores from -1 to 1, got {min(scores)} to {max(scores)}"
        raise ValueError(f"{source}: {problem}: declare their range with data.score_scale LOWEST HIGHEST")
    return dataset, counts


def _rows(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    options = {"labels": data.labels, "neutral": data.neutral, "pairing": data.pairing}
    return table_of(source, data, row_table, num_negatives=data.num_negatives, **options)


def _triplets(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    """Read rows that all have exactly one negative."""
    dataset, counts = _rows(source, data, prompt, with_label)
    names = {*dataset.column_names} - {"neutral"}
    if names != {"anchor", "positive", "negative"} or dataset.data.column("negative").null_count:
        advice = "for other numbers of negatives use InfoNCELoss"
        raise ValueError(f"{source}: the loss needs exactly one negative in every row: {advice}")
    return dataset, counts


def _one_negative(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    if data.neutral:
        raise ValueError("TripletLoss has no neutral texts: use data.neutral with InfoNCELoss or AnglEContrastiveLoss")
    return _triplets(source, data, prompt, with_label)


def _labelled(source: str, data: Data, prompt: str | None, with_label: bool, *, count: int, rule: str) -> Table:
    """Read pairs with labels 0 … count - 1."""
    labels = data.labels or ({"0": 0, "1": 1} if count == 2 else None)
    dataset, counts = table_of(source, data, pair_table, "score", names=[*SENTENCES, "label"], labels=labels)
    if beyond := sorted(set(dataset.unique("label")) - {*range(count)}):
        raise ValueError(f"{source}: {rule}, got {', '.join(map(str, beyond))}")
    return dataset, counts


def _lists(source: str, data: Data, prompt: str | None, with_label: bool) -> Table:
    return list_table(source, on_error=data.on_error)


SCORED_PAIRS = Reads("scored pairs", _ranked_pairs, ScoreLabelCollator)
COSINES = Reads("scored pairs", _cosines)  # RowCollator passes the scores as labels
ROWS = Reads("rows", _rows)  # anchor, positive, any number of negatives
ROWS_WITH_TEXTS = Reads("rows", _rows, TextCollator)
TRIPLETS = Reads("triplets", _triplets)  # with a neutral text if data.neutral is set
ONE_NEGATIVE = Reads("triplets", _one_negative)
LABELLED_PAIRS = Reads("labelled pairs", partial(_labelled, count=2, rule="labels must be 1 (similar) or 0 (not)"))
CLASSES = Reads("NLI pairs", partial(_labelled, count=3, rule="classes must be 0, 1 or 2"))
LISTS = Reads("lists", _lists, ListCollator)  # raoe_train.training.training_data adds the targets
RANKING = (ROWS, ROWS_WITH_TEXTS, TRIPLETS, ONE_NEGATIVE)  # dev sets may lack scores
