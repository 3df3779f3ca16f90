"""Losses that are sentence-transformers' own, and the language model's, as recipes name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from sentence_transformers.sentence_transformer import losses
from torch import nn

from raoe_train.losses.base import AboveZero, FromZero
from raoe_train.losses.reads import (
    CLASSES,
    COSINES,
    LABELLED_PAIRS,
    ONE_NEGATIVE,
    PAIRS,
    SENTENCES_ALONE,
    Reads,
)

Distance = Literal["cosine", "euclidean"]


def of_recipes(reads: Reads, compares_batch: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function that returns a loss an entry of raoe_train.losses.registry, by its own name; see CachedLoss."""

    def entry(function: Any) -> Callable[..., Any]:
        function.name, function.reads, function.compares_batch = function.__name__, reads, compares_batch
        return function

    return entry


@of_recipes(COSINES)
def mse(model: Any) -> Any:
    """Mean of (cosine - score)²."""
    return losses.CosineSimilarityLoss(model)


@of_recipes(ONE_NEGATIVE)
def triplet(model: Any, margin: FromZero = 5.0, distance: Distance = "euclidean") -> Any:
    """Mean of max(0, distance to the positive - distance to the negative + margin).

    Args:
        margin: least difference of distances.
        distance: of two embeddings, cosine or euclidean.
    """
    metric = getattr(losses.TripletDistanceMetric, distance.upper())
    return losses.TripletLoss(model, distance_metric=metric, triplet_margin=margin)


@of_recipes(LABELLED_PAIRS)
def contrastive(model: Any, margin: FromZero = 0.5, distance: Distance = "cosine") -> Any:
    """Half of the mean of distance² of similar pairs and max(0, margin - distance)² of others."""
    return losses.ContrastiveLoss(model, distance_metric=_siamese(distance), margin=margin)


@of_recipes(LABELLED_PAIRS, compares_batch=True)
def online_contrastive(model: Any, margin: FromZero = 0.5, distance: Distance = "cosine") -> Any:
    """contrastive of the batch's hard pairs alone, a sum."""
    return losses.OnlineContrastiveLoss(model, distance_metric=_siamese(distance), margin=margin)


@of_recipes(CLASSES)
def softmax(model: Any) -> Any:
    """Cross entropy of the three NLI classes, by a linear classifier of (u, v, |u - v|) that is trained beside the
    encoder, and goes with the loss: SBERT."""
    # on no model, when asked what it is, it has no classifier
    return nn.Module() if model is None else losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=3)


@of_recipes(PAIRS, compares_batch=True)
def multiple_negatives(model: Any, scale: AboveZero = 20.0) -> Any:
    """Each first sentence is to find its partner among the batch's second ones."""
    return losses.MultipleNegativesRankingLoss(model, scale=scale)


class CausalLM:
    """No loss of an encoder: the decoder that it is made of is trained to predict each next token of single sentences,
    by raoe_train.training.language_model."""

    name = "causal_lm"
    reads = SENTENCES_ALONE

    def __init__(self, model: Any) -> None:
        self.model = model


def _siamese(distance: Distance) -> Any:
    metric = losses.SiameseDistanceMetric
    return metric.COSINE_DISTANCE if distance == "cosine" else metric.EUCLIDEAN
