"""What a loss trains on: how a source becomes a dataset with its columns, and what makes batches of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.compute import min_max
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from raoe_train.data.columns import resolve_label_map
from raoe_train.data.conditional import conditional_table, is_conditional
from raoe_train.data.pairs import pair_table
from raoe_train.data.ranking_lists import list_table
from raoe_train.data.settings import Data
from raoe_train.data.sources import contents
from raoe_train.data.tables import kept, to_table
from raoe_train.data.triplets import triplet_table
from raoe_train.losses.collators import ListCollator, ScoreLabelCollator, TextCollator

logger = logging.getLogger(__name__)

Table = tuple[Any, dict[str, Any]]
"""(a datasets.Dataset, counts: {"dropped": {reason: rows}, …})."""
SENTENCES = ["sentence1", "sentence2"]


@dataclass(frozen=True)
class Reads:
    """What a loss trains on."""

    name: str  # in messages, such as "triplets"
    # (source, data, prompt, loss): `data` is the section of the recipe, with the labels and score_scale of this source,
    # `prompt` is model.prompt, `loss` is the module, made without a model.
    read: Callable[[str, Data, str | None, Any], Table]
    collator: type[SentenceTransformerDataCollator] = SentenceTransformerDataCollator


def _kept(source: str, data: Data, kind: str, make: Callable[..., Table], *unread: str, **asked: Any) -> Table:
    """`make` of a source, by way of data.cache_dir; `asked` is all that the rows depend on beside the file."""
    asked = {"columns": {**data.columns, **dict.fromkeys(unread, "none")}, "on_error": data.on_error, **asked}
    made_from = None
    if data.cache_dir is not None and (file := contents(source)) is not None:
        made_from = {"file": file, "kind": kind, **asked}
        if asked.get("labels"):
            made_from["labels"] = resolve_label_map(asked["labels"])  # keys of one kind
    return kept(data.cache_dir, made_from, lambda path: make(source, path=path, **asked))


def _scored_pairs(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    """Columns sentence1, sentence2, score and, where the loss needs it, label; a C-STS file where the prompt has a
    {condition}."""
    needs_label = getattr(loss, "needs_label", False)
    if is_conditional(prompt):
        if needs_label:
            raise ValueError("C-STS has no NLI labels: use loss rank_margin or cosent, or loss.gate score")
        return _kept(source, data, "scored pairs", conditional_table, prompt=prompt)
    names = [*SENTENCES, "score", *(["label"] if needs_label else [])]
    asked = {"names": names, "labels": data.labels, "score_scale": data.score_scale or None}
    return _kept(source, data, "scored pairs", pair_table, **asked)


def _ranked_pairs(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    """Scored pairs of which some score is above another."""
    dataset, counts = _scored_pairs(source, data, prompt, loss)
    scores = min_max(dataset.data.column("score")).as_py()
    if scores["min"] == scores["max"]:
        problem = f"{source}: all {len(dataset)} scores are {scores['min']:g}, so that no pair ranks above another"
        if not getattr(loss, "needs_label", False):
            raise ValueError(f"{problem}: the loss would be 0")
        logger.warning("%s; only its labels are learned from", problem)
    return dataset, counts


def _cosines(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    """Scored pairs whose scores are compared with cosines: brought from data.score_scale to 0 … 1, but where it
    goes from below 0 to at most 1 and at least -1 they are cosines already."""
    dataset, counts = _scored_pairs(source, data, prompt, loss)
    scores = dataset["score"][:]
    lowest, highest = data.score_scale or (-1, 1)
    if not -1 <= lowest < 0 < highest <= 1:
        unit = [(score - lowest) / (highest - lowest) for score in scores]
        return dataset.remove_columns("score").add_column("score", unit), counts
    if min(scores) < -1 or max(scores) > 1:
        raise ValueError(
            f"{source}: loss mse compares scores with cosines, and these run from {min(scores)} to {max(scores)}; "
            "declare data.score_scale LOWEST HIGHEST"
        )
    return dataset, counts


def _triplets(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    asked = {"labels": data.labels, "neutral": data.neutral, "pairing": data.pairing}
    return _kept(source, data, "triplets", triplet_table, **asked)


def _one_negative(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    if data.neutral:
        raise ValueError("loss triplet has one negative: data.neutral is for infonce and angle_contrastive")
    return _triplets(source, data, prompt, loss)


def _labelled_pairs(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    asked = {"names": [*SENTENCES, "label"], "labels": data.labels or {"0": 0, "1": 1}}
    dataset, counts = _kept(source, data, "labelled pairs", pair_table, "score", **asked)
    if beyond := sorted(set(dataset.unique("label")) - {0, 1}):
        raise ValueError(f"{source}: labels are 1 for similar and 0 for not, got {', '.join(map(str, beyond))}")
    return dataset, counts


def _classes(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    asked = {"names": [*SENTENCES, "label"], "labels": data.labels}
    dataset, counts = _kept(source, data, "NLI pairs", pair_table, "score", **asked)
    if beyond := sorted(set(dataset.unique("label")) - {0, 1, 2}):
        raise ValueError(f"{source}: classes are 0, 1 and 2, got {', '.join(map(str, beyond))}")
    return dataset, counts


def _pairs(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    return _kept(source, data, "pairs", pair_table, "score", "label", names=SENTENCES)


def _lists(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    dataset, counts = list_table(source, on_error=data.on_error)
    return dataset.select_columns(["sentences"]), counts


def _sentences(source: str, data: Data, prompt: str | None, loss: Any) -> Table:
    return _kept(source, data, "sentences", _distinct, "score", "label", names=SENTENCES)


def _distinct(source: str, names: list[str], path: Path | None, **asked: Any) -> Table:
    """The different sentences of a source of pairs, column text."""
    pairs, counts = pair_table(source, names, **asked)
    texts = dict.fromkeys(text for name in names for text in pairs.unique(name))
    return to_table(({"text": text} for text in texts), path), counts


SCORED_PAIRS = Reads("scored pairs", _ranked_pairs, ScoreLabelCollator)
COSINES = Reads("scored pairs", _cosines)  # collated as sentence-transformers does: the score is the label
TRIPLETS = Reads("triplets", _triplets)  # anchor, positive, negative and, with data.neutral, neutral
TRIPLETS_WITH_TEXTS = Reads("triplets", _triplets, TextCollator)
ONE_NEGATIVE = Reads("triplets", _one_negative)
LABELLED_PAIRS = Reads("labelled pairs", _labelled_pairs)  # 1 similar, 0 not
CLASSES = Reads("NLI pairs", _classes)  # of three classes
PAIRS = Reads("pairs", _pairs)  # each a positive one
PAIRS_WITH_TEXTS = Reads("pairs", _pairs, TextCollator)
LISTS = Reads("lists", _lists, ListCollator)  # their targets are training's to make, raoe_train.training.list_targets
SENTENCES_ALONE = Reads("sentences", _sentences)
