"""What the losses of sentence pairs share: reading labels, gradient caching, gathering."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor

from raoe_kernels import pairwise_cosine
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.gathering import Gather, gather_pairs


class LossParts(dict):
    """Named parts of one loss, each a differentiable scalar; the loss is their sum.

    The trainer adds them up and logs each one. Wrappers such as MatryoshkaLoss scale and add losses, so parts
    can be scaled and added, name by name.
    """

    def __rmul__(self, weight: float) -> LossParts:
        return LossParts({name: weight * part for name, part in self.items()})

    def __radd__(self, other: float) -> LossParts:
        if other != 0:
            raise TypeError(f"a number other than 0 belongs to none of the parts {', '.join(self)}; got {other!r}")
        return self

    def __add__(self, other: Mapping[str, Tensor]) -> LossParts:
        return LossParts({name: part + other[name] for name, part in self.items()})


class PairLoss(CachedLoss):
    """What the losses of pairs share: reading labels, gradient caching, gathering.

    A subclass implements ``_loss(similarity, score, label)`` with (B,) tensors.
    """

    needs_label = False

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__(model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices)
        self._checked_labels = False
        self._warned: set[str] = set()

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any) -> Tensor | dict[str, Tensor]:
        """The loss of a batch.

        Args:
            sentence_features: tokenised columns, two of them with B rows each.
            labels: see the module's docstring.
        """
        if self.uses_gradient_cache:
            return self._forward_cached(sentence_features, labels)
        return self.compute_loss_from_embeddings(embed_columns(self.model, sentence_features), labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any) -> Tensor | dict[str, Tensor]:
        """The loss of two (B, D) embeddings. ValueError where labels are missing, too many or NaN."""
        if len(embeddings) != 2:
            raise ValueError(f"{type(self).__name__} compares 2 columns of sentences, got {len(embeddings)}")
        score, label = self._targets(labels, embeddings[0].shape[0])
        similarity = self._similarity(embeddings[0], embeddings[1])
        if self.gather_across_devices:
            similarity, score, label = gather_pairs(similarity, score, label, uneven=self.uneven)
        return self._loss(similarity, score, label)

    def _of_whole_batch(self, embeddings: list[Tensor], labels: Any) -> Tensor:
        loss = self.compute_loss_from_embeddings(embeddings, labels)
        if isinstance(loss, dict):
            self._cached_parts.append({name: part.detach() for name, part in loss.items()})
            loss = torch.stack(list(loss.values())).sum()
        return loss

    def _forward_cached(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Any
    ) -> Tensor | dict[str, Tensor]:
        self._cached_parts: list[dict[str, Tensor]] = []
        total = self.forward_cached(sentence_features, labels)
        if len(self._cached_parts) != 1:  # no parts, or one set for each dimension of a MatryoshkaLoss
            return total
        # Only the total carries the hook that replays the mini-batches; the first part's value takes its
        # place.
        (parts,) = self._cached_parts
        first = next(iter(parts))
        return LossParts({**parts, first: parts[first] + (total - total.detach())})

    def _similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return pairwise_cosine(a, b)

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor | dict[str, Tensor]:
        raise NotImplementedError

    def _targets(self, labels: Any, rows: int) -> tuple[Tensor, Tensor | None]:
        """(score, label) of a batch, label None where it was not given."""
        label: Tensor | None = None
        if isinstance(labels, Mapping):
            if "score" not in labels:
                raise ValueError(f"{type(self).__name__} needs a score for each pair, got columns {sorted(labels)}")
            score, label = labels["score"], labels.get("label")
        elif labels is None:
            raise ValueError(f"{type(self).__name__} needs labels: a score for each pair")
        elif labels.ndim == 2 and labels.shape[1] == 2:
            label, score = labels[:, 0], labels[:, 1]
        else:
            score = labels.reshape(-1)
        for name, column in (("score", score), ("label", label)):
            if column is not None and column.numel() != rows:
                raise ValueError(
                    f"{type(self).__name__} expects {rows} values of {name} (one per pair), "
                    f"got {column.numel()} with shape {tuple(column.shape)}"
                )
        if self.needs_label and label is None:
            raise ValueError(
                f"{type(self).__name__} needs an NLI label for each pair: use raoe_train.ScoreLabelCollator "
                "with columns 'label' and 'score', or one column 'label' of [label, score]"
            )
        score = score.reshape(-1).detach()
        score = score.int() if score.dtype == torch.bool else score
        label = label.reshape(-1).detach() if self.needs_label and label is not None else None
        self._check(score, label)
        return score, label.long() if label is not None else None

    def _check(self, score: Tensor, label: Tensor | None) -> None:
        # A look at the values makes a GPU wait, so there only the first batch is looked at.
        if self._checked_labels and score.device.type != "cpu":
            return
        self._checked_labels = True
        if score.is_floating_point() and bool(score.isnan().any()):
            raise ValueError(f"{type(self).__name__} got a score that is NaN: remove or complete such pairs")
        if label is not None and bool(((label < 0) | (label != label.floor())).any() | label.isnan().any()):
            raise ValueError(
                f"{type(self).__name__} takes labels that are whole numbers from 0, larger = less related "
                f"(-1 marks a pair without one: remove it), got {label.unique().tolist()[:8]}"
            )

    def _warn_small_batch(self, rows: int, margin: float) -> None:
        if rows <= margin + 1 and "small" not in self._warned:
            self._warned.add("small")
            warnings.warn(
                f"a batch of {rows} pairs has no two ranks further apart than margin={margin}: the rank part is 0",
                stacklevel=4,
            )
