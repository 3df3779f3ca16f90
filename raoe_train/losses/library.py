"""sentence-transformers losses for recipes, as subclasses that declare what training data they need."""

from typing import Any, Literal

from sentence_transformers.sentence_transformer import losses

from raoe_train.config import NonNegativeFloat, convert
from raoe_train.losses.base import Loss
from raoe_train.losses.collators import CLASSES, COSINES, LABELLED_PAIRS, ONE_NEGATIVE

Distance = Literal["cosine", "euclidean"]


class CosineSimilarityLoss(Loss, losses.CosineSimilarityLoss):
    """Mean squared error between cosines and scores: the mean of (cosine - score)²."""

    reads = COSINES

    def __init__(self, model: Any) -> None:
        super().__init__(model)


class AutoLoss(Loss):
    """Placeholder in recipes for the loss that fits the columns of data.train. AutoLoss becomes PearsonLoss for pairs
    with scores or NLI labels, and InfoNCELoss for rows of queries and passages."""

    reads = COSINES

    def __init__(self, model: Any) -> None:
        raise TypeError("AutoLoss works only in recipes: use PearsonLoss or InfoNCELoss")


class TripletLoss(Loss, losses.TripletLoss):
    """Triplet loss: the mean of max(0, distance to the positive - distance to the negative + margin).

    Args:
        margin: how much farther from the anchor the negative must be than the positive
        distance: distance function for two embeddings
    """

    reads = ONE_NEGATIVE

    def __init__(self, model: Any, margin: NonNegativeFloat = 5.0, distance: Distance = "euclidean") -> None:
        metric = getattr(losses.TripletDistanceMetric, convert("distance", distance, Distance).upper())
        super().__init__(model, metric, convert("margin", margin, NonNegativeFloat))


class _Siamese(Loss):
    """Base class of ContrastiveLoss and OnlineContrastiveLoss.

    Args:
        margin: distance at or above which the loss of dissimilar pairs is 0
        distance: distance function for two embeddings
    """

    reads = LABELLED_PAIRS

    def __init__(self, model: Any, margin: NonNegativeFloat = 0.5, distance: Distance = "cosine") -> None:
        name = "COSINE_DISTANCE" if convert("distance", distance, Distance) == "cosine" else "EUCLIDEAN"
        metric, margin = getattr(losses.SiameseDistanceMetric, name), convert("margin", margin, NonNegativeFloat)
        super().__init__(model, metric, margin)  # type: ignore


class ContrastiveLoss(_Siamese, losses.ContrastiveLoss):
    """Contrastive loss: half the mean of distance² (similar pairs) or max(0, margin - distance)² (dissimilar pairs)."""


class OnlineContrastiveLoss(_Siamese, losses.OnlineContrastiveLoss):
    """Contrastive loss over only the hard pairs in a batch: the sum of distance² or max(0, margin - distance)²."""


class SoftmaxLoss(Loss, losses.SoftmaxLoss):
    """Cross entropy of a linear classifier that predicts the three NLI classes from (u, v, |u - v|), where u and v are
    the embeddings of a pair's two texts (SBERT, Reimers and Gurevych 2019, section 3). The classifier is not saved."""

    reads = CLASSES

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.get_embedding_dimension(), num_labels=3)
