"""What a loss trains on: how a source becomes a dataset with its columns, and what makes batches of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyarrow.compute import min_max
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from raoe_train.data.pairs import conditional_table, is_conditional, pair_table
from raoe_train.data.settings import Data
from raoe_train.data.tables import to_table
from raoe_train.data.triplets import list_table, triplet_table
from raoe_train.losses.collators import ListCollator, ScoreLabelCollator, TextCollator

logger = logging.getLogger(__name__)

Table = tuple[Any, dict[str, Any]]
"""(a datasets.Dataset, counts: {"dropped": {reason: rows}, …})."""
Settings = Mapping[str, Any]
"""The keywords of a loss."""
SENTENCES = ["sentence1", "sentence2"]


@dataclass(frozen=True)
class Reads:
    """What a loss trains on."""

    name: str  # in messages, such as "triplets"
    # (source, data, prompt, settings): `data` has the labels and score_scale of this source, `prompt` is model.prompt
    read: Callable[[str, Data, str | None, Settings], Table]
    collator: type[SentenceTransformerDataCollator] = SentenceTransformerDataCollator


def needs_label(settings: Settings) -> bool:
    """Whether a loss with these keywords compares NLI labels: RAOE's do unless their gate is the score alone."""
    return settings.get("gate", "score") != "score"


def _table(source: str, data: Data, make: Callable[..., Table], *unread: str, **asked: Any) -> Table:
    """The rows of a source, its columns `unread` left out."""
    columns = {**data.columns, **dict.fromkeys(unread, "none")}
    return make(source, columns=columns, on_error=data.on_error, **asked)


def _scored_pairs(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    """Columns sentence1, sentence2, score and, where the loss needs it, label; a C-STS file where the prompt has a
    {condition}."""
    labelled = needs_label(settings)
    if is_conditional(prompt):
        if labelled:
            raise ValueError("C-STS has no NLI labels: use RankMarginLoss or CoSENTLoss, or loss.gate score")
        return _table(source, data, conditional_table, prompt=prompt)
    names = [*SENTENCES, "score", *(["label"] if labelled else [])]
    asked = {"names": names, "labels": data.labels, "score_scale": data.score_scale or None}
    return _table(source, data, pair_table, **asked)


def _ranked_pairs(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    """Scored pairs of which some score is above another."""
    dataset, counts = _scored_pairs(source, data, prompt, settings)
    scores = min_max(dataset.data.column("score")).as_py()
    if scores["min"] == scores["max"]:
        problem = f"{source}: all {len(dataset)} scores are {scores['min']:g}, so that no pair ranks above another"
        if not needs_label(settings):
            raise ValueError(f"{problem}: the loss would be 0")
        logger.warning("%s; only its labels are learned from", problem)
    return dataset, counts


def _cosines(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    """Scored pairs whose scores are compared with cosines: brought from data.score_scale to 0 … 1, but where it
    goes from below 0 to at most 1 and at least -1 they are cosines already."""
    dataset, counts = _scored_pairs(source, data, prompt, settings)
    scores = dataset["score"][:]
    lowest, highest = data.score_scale or (-1, 1)
    if not -1 <= lowest < 0 < highest <= 1:
        unit = [(score - lowest) / (highest - lowest) for score in scores]
        return dataset.remove_columns("score").add_column("score", unit), counts
    if min(scores) < -1 or max(scores) > 1:
        raise ValueError(
            f"{source}: CosineSimilarityLoss compares scores with cosines, and these run from {min(scores)} to "
            f"{max(scores)}; declare data.score_scale LOWEST HIGHEST"
        )
    return dataset, counts


def _triplets(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    asked = {"labels": data.labels, "neutral": data.neutral, "pairing": data.pairing}
    return _table(source, data, triplet_table, **asked)


def _one_negative(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    if data.neutral:
        raise ValueError("TripletLoss has one negative: data.neutral is for InfoNCELoss and AnglEContrastiveLoss")
    return _triplets(source, data, prompt, settings)


def _labelled_pairs(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    return _labelled(source, data, data.labels or {"0": 0, "1": 1}, 2, "labels are 1 for similar and 0 for not")


def _classes(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    return _labelled(source, data, data.labels, 3, "classes are 0, 1 and 2")


def _labelled(source: str, data: Data, labels: Any, count: int, rule: str) -> Table:
    dataset, counts = _table(source, data, pair_table, "score", names=[*SENTENCES, "label"], labels=labels)
    if beyond := sorted(set(dataset.unique("label")) - {*range(count)}):
        raise ValueError(f"{source}: {rule}, got {', '.join(map(str, beyond))}")
    return dataset, counts


def _pairs(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    return _table(source, data, pair_table, "score", "label", names=SENTENCES)


def _lists(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    dataset, counts = list_table(source, on_error=data.on_error)
    return dataset.select_columns(["sentences"]), counts


def _sentences(source: str, data: Data, prompt: str | None, settings: Settings) -> Table:
    return _table(source, data, _distinct, "score", "label", names=SENTENCES)


def _distinct(source: str, names: list[str], **asked: Any) -> Table:
    """The different sentences of a source of pairs, column text."""
    pairs, counts = pair_table(source, names, **asked)
    texts = dict.fromkeys(text for name in names for text in pairs.unique(name))
    return to_table({"text": text} for text in texts), counts


SCORED_PAIRS = Reads("scored pairs", _ranked_pairs, ScoreLabelCollator)
COSINES = Reads("scored pairs", _cosines)  # collated as sentence-transformers does: the score is the label
TRIPLETS = Reads("triplets", _triplets)  # anchor, positive, negative and, with data.neutral, neutral
TRIPLETS_WITH_TEXTS = Reads("triplets", _triplets, TextCollator)
ONE_NEGATIVE = Reads("triplets", _one_negative)
LABELLED_PAIRS = Reads("labelled pairs", _labelled_pairs)  # 1 similar, 0 not
CLASSES = Reads("NLI pairs", _classes)  # of three classes
PAIRS = Reads("pairs", _pairs)  # each a positive one
PAIRS_WITH_TEXTS = Reads("pairs", _pairs, TextCollator)
LISTS = Reads("lists", _lists, ListCollator)  # their targets are training's to make, raoe_train.training.training_data
SENTENCES_ALONE = Reads("sentences", _sentences)
