"""Losses of sentence-transformers for recipes: subclasses that declare the training data that they need."""

from typing import Any, Literal

from sentence_transformers.sentence_transformer import losses

from raoe_train.config import NonNegativeFloat, PositiveFloat, convert
from raoe_train.losses.base import Loss
from raoe_train.losses.reads import CLASSES, COSINES, LABELLED_PAIRS, ONE_NEGATIVE, PAIRS

Distance = Literal["cosine", "euclidean"]


class CosineSimilarityLoss(Loss, losses.CosineSimilarityLoss):
    """Mean of (cosine - score)²."""

    reads = COSINES

    def __init__(self, model: Any) -> None:
        super().__init__(model)


class AutoLoss(Loss):
    """In recipes, the loss that fits the columns of data.train: PearsonLoss for pairs with scores or NLI labels,
    InfoNCELoss for rows of queries and passages."""

    reads = COSINES

    def __init__(self, model: Any) -> None:
        raise TypeError("AutoLoss stands for PearsonLoss or InfoNCELoss in recipes: name one of them")


class TripletLoss(Loss, losses.TripletLoss):
    """Mean of max(0, distance to the positive - distance to the negative + margin).

    Args:
        margin: minimum difference between the two distances
        distance: distance function of two embeddings
    """

    reads = ONE_NEGATIVE

    def __init__(self, model: Any, margin: NonNegativeFloat = 5.0, distance: Distance = "euclidean") -> None:
        metric = getattr(losses.TripletDistanceMetric, convert("distance", distance, Distance).upper())
        super().__init__(model, metric, convert("margin", margin, NonNegativeFloat))


class _Siamese(Loss):
    """Base class of the two losses of labelled pairs.

    Args:
        margin: distance from which dissimilar pairs have loss 0
        distance: distance function of two embeddings
    """

    reads = LABELLED_PAIRS

    def __init__(self, model: Any, margin: NonNegativeFloat = 0.5, distance: Distance = "cosine") -> None:
        name = "COSINE_DISTANCE" if convert("distance", distance, Distance) == "cosine" else "EUCLIDEAN"
        metric, margin = getattr(losses.SiameseDistanceMetric, name), convert("margin", margin, NonNegativeFloat)
        super().__init__(model, metric, margin)  # type: ignore


class ContrastiveLoss(_Siamese, losses.ContrastiveLoss):
    """Half of the mean of distance² for similar pairs and max(0, margin - distance)² for other pairs."""


class OnlineContrastiveLoss(_Siamese, losses.OnlineContrastiveLoss):
    """ContrastiveLoss, summed over only the hard pairs of a batch."""


class SoftmaxLoss(Loss, losses.SoftmaxLoss):
    """Cross entropy of the three NLI classes, predicted by a linear classifier from (u, v, |u - v|), as in SBERT
    (Reimers and Gurevych 2019, section 3). The classifier is trained with the encoder, but is no part of it."""

    reads = CLASSES

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.get_embedding_dimension(), num_labels=3)


class MultipleNegativesRankingLoss(Loss, losses.MultipleNegativesRankingLoss):
    """sentence-transformers' loss, as a baseline. InfoNCELoss also accepts rows without negatives and masks duplicates.

    Args:
        scale: inverse temperature
    """

    reads = PAIRS

    def __init__(self, model: Any, scale: PositiveFloat = 20.0) -> None:
        super().__init__(model, scale=convert("scale", scale, PositiveFloat))
