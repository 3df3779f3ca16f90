"""sentence-transformers' own losses, of the same names, settings, values and gradients, computed by raoe_kernels."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn

from raoe_kernels import cosent_loss, pairwise_cosine
from raoe_train.losses.base import settings_of
from raoe_train.losses.infonce import InfoNCELoss

ENVIRONMENT = "RAOE_ACCELERATE"


class AcceleratedCoSENTLoss(losses.CoSENTLoss):
    """See accelerate."""

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor) -> Tensor:
        if _why_not(self) or labels.numel() != len(embeddings[0]):  # theirs says what is wrong with labels
            return super().compute_loss_from_embeddings(embeddings, labels)
        of_pairs = pairwise_cosine if self.similarity_fct is util.pairwise_cos_sim else self.similarity_fct
        labels = labels.reshape(-1).detach()
        return cosent_loss(
            of_pairs(embeddings[0], embeddings[1]),
            labels.int() if labels.dtype == torch.bool else labels,
            scale=self.scale,
        )


class AcceleratedAnglELoss(losses.AnglELoss, AcceleratedCoSENTLoss):
    """See accelerate."""


class AcceleratedMultipleNegativesRankingLoss(losses.MultipleNegativesRankingLoss):
    """See accelerate."""

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Tensor:
        if _why_not(self):
            return super().compute_loss_from_embeddings(embeddings, labels)
        return _contrast(self, embeddings)


class AcceleratedCachedMultipleNegativesRankingLoss(losses.CachedMultipleNegativesRankingLoss):
    """See accelerate."""

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        if _why_not(self):
            return super().calculate_loss(reps, labels, with_backward=with_backward)
        loss = _contrast(self, [torch.cat(column) for column in reps])
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss


KINDS: tuple[Any, ...] = (
    AcceleratedCoSENTLoss,
    AcceleratedAnglELoss,
    AcceleratedMultipleNegativesRankingLoss,
    AcceleratedCachedMultipleNegativesRankingLoss,
)


def accelerate(loss: nn.Module) -> Any:
    """sentence-transformers' loss, computed by raoe_kernels: the same model, settings, values and gradients.

    It is a loss of the same class, for any trainer or loop; put it into a MatryoshkaLoss, not around one. Settings that
    are changed afterwards count, and what our ops do not have is then computed as before. In half precision, cosines
    are float32, as theirs are not. With the environment variable RAOE_ACCELERATE=0 it is the loss itself.

    Args:
        loss: a CoSENTLoss, AnglELoss, MultipleNegativesRankingLoss or CachedMultipleNegativesRankingLoss of
            sentence_transformers.

    Raises:
        ValueError: another loss, a class of one's own made from these, too, a similarity_fct other than cos_sim of the
            last two, a scale not above 0, or a RAOE_ACCELERATE other than 0 and 1.
    """
    wish = os.environ.get(ENVIRONMENT) or "1"
    if wish not in ("0", "1"):
        raise ValueError(f"{ENVIRONMENT} must be 0 or 1, got {wish!r}")
    if wish == "0" or isinstance(loss, KINDS):
        return loss
    kinds = {next(base for base in kind.__bases__ if base.__module__.startswith("sentence_")): kind for kind in KINDS}
    if type(loss) not in kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"accelerate takes {names} of sentence_transformers, not {type(loss).__name__}")
    if why := _why_not(loss):
        raise ValueError(f"accelerate cannot serve this {type(loss).__name__}: {why}")
    settings = {name: getattr(loss, name) for name in settings_of(type(loss))}
    return kinds[type(loss)](loss.model, **settings).train(loss.training)


def _why_not(loss: Any) -> str | None:
    """What our ops do not have of this loss's settings, None if nothing."""
    if not loss.scale > 0:
        return f"scale must be above 0, got {loss.scale!r}"
    if isinstance(loss, losses.CoSENTLoss) or loss.similarity_fct is util.cos_sim:
        return None
    return f"similarity_fct must be util.cos_sim, got {getattr(loss.similarity_fct, '__name__', loss.similarity_fct)}"


def _contrast(loss: Any, embeddings: list[Tensor]) -> Tensor:
    """The loss of such embeddings, by our loss of the same settings."""
    settings = {name: getattr(loss, name) for name in _shared(type(loss))}  # type: ignore[arg-type]
    return InfoNCELoss(None, mask_duplicates=False, **settings).compute_loss_from_embeddings(embeddings)  # type: ignore


@cache
def _shared(kind: type) -> list[str]:
    """The settings that it shares with our loss, by name; embeddings are whole here."""
    return [*settings_of(InfoNCELoss).keys() & settings_of(kind).keys() - {"mini_batch_size", "mini_batch_num_tokens"}]
