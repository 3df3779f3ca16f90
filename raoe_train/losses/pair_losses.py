"""What the losses of sentence pairs share: reading labels, and parts of a loss that are shown apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from raoe_kernels import pairwise_cosine
from raoe_train.losses.base import AUTO, CachedLoss, Count, Scale, carrying
from raoe_train.losses.gathering import gather_pairs
from raoe_train.losses.pair_memory import PairMemory
from raoe_train.losses.reads import SCORED_PAIRS
from raoe_train.recipe import Option


class LossParts(dict):
    """Named parts of one loss, each a differentiable scalar; the loss is their sum.

    The trainer adds them up and logs each one. Wrappers such as MatryoshkaLoss and AdaptiveLayerLoss scale and add
    losses, so parts can be scaled and added, name by name; a tensor that is added is the part "others".
    """

    def __rmul__(self, weight: float) -> LossParts:
        return LossParts({name: weight * part for name, part in self.items()})

    __mul__ = __rmul__

    def __truediv__(self, number: float) -> LossParts:
        return self * (1 / number)

    def __radd__(self, other: float) -> LossParts:
        if other != 0:
            raise TypeError(f"a number other than 0 belongs to none of the parts {', '.join(self)}; got {other!r}")
        return self

    def __add__(self, other: Mapping[str, Tensor] | Tensor) -> LossParts:
        more = other if isinstance(other, Mapping) else {"others": other}  # what a wrapper adds of its own
        return LossParts({name: self.get(name, 0) + more.get(name, 0) for name in {**self, **more}})


class PairLoss(CachedLoss):
    """A loss of scored pairs: a subclass implements ``of_pairs(similarity, score, label)``, all (B,), label None unless
    `needs_label`; it is the loss, (), or LossParts. Labels see raoe_train.losses. Of one that is a OneSweep, too,
    similarity may be (K, B), and the losses (K,).

    With a memory the loss is that of B + M pairs, of which the batch's alone have a gradient; ranks are among all of
    them. What is remembered comes after gathering, so all processes remember the same. Where no gradient is wanted, or
    the loss or its model is in evaluation mode, it is neither read nor written. It is in checkpoints.

    Args:
        model, scale, cached: see CachedLoss.
        memory_size: pairs of earlier steps that each batch is compared with, too; 0 for none.
        memory_age: steps after which a pair is forgotten; None keeps it until newer ones push it out.

    Raises:
        ValueError: a memory_size below 0 or of a loss that compares no pairs, or a memory_age below 1.
    """

    reads = SCORED_PAIRS
    by_order = False  # whether scores count by their order alone; others get them in similarity's dtype
    dims: tuple[int, ...] | None = None  # see OneSweep

    def __init__(
        self,
        model: Any,
        scale: Scale = 20.0,
        *,
        memory_size: Annotated[int, Option(least=0)] = 0,
        memory_age: Count = None,
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        if isinstance(memory_size, bool) or not isinstance(memory_size, int) or memory_size < 0:
            raise ValueError(f"memory_size must be a whole number of pairs from 0, got {memory_size!r}")
        if memory_age is not None and (not isinstance(memory_age, int) or memory_age < 1):
            raise ValueError(f"memory_age must be a whole number of steps from 1, or None, got {memory_age!r}")
        if memory_size and not self.compares_batch:
            raise ValueError(
                f"memory_size must be 0 for {type(self).__name__}, which compares no pairs; got {memory_size}"
            )
        self.memory_size = memory_size
        self.memory_age = memory_age
        self.memory = PairMemory(memory_size, memory_age) if memory_size else None
        self._width: int | None = None
        self._checked_labels = False
        self._warned = False

    @property
    def needs_label(self) -> bool:
        """Whether each pair must have an NLI label."""
        return False

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Any:
        self._cached_parts: list[Any] = []
        loss = super().forward(sentence_features, labels)
        if len(self._cached_parts) != 1:  # no parts, or one set for each dimension of a MatryoshkaLoss
            return loss
        return carrying(self._cached_parts[0], loss)

    def total(self, loss: Any) -> Tensor:
        if not isinstance(loss, dict):
            return loss
        self._cached_parts.append(LossParts({name: part.detach() for name, part in loss.items()}))
        return torch.stack(list(loss.values())).sum()

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        """The loss of two columns of (B, D) embeddings. ValueError for labels that are missing, too many or NaN."""
        if len(embeddings) != 2:
            raise ValueError(f"{type(self).__name__} compares 2 columns of sentences, got {len(embeddings)}")
        if self.scale == AUTO:
            raise ValueError("scale 'auto' is measured by raoe_train.Trainer; a loop of your own gives a number: 20")
        score, label = self.targets(labels, embeddings[0].shape[0])
        similarity = self.similarity(embeddings[0], embeddings[1])
        if self.gather_across_devices:
            similarity, score, label = gather_pairs(similarity.movedim(-1, 0), score, label, uneven=self.uneven)
            similarity = similarity.movedim(0, -1)
        if self.memory is not None and self._trains(embeddings[0].shape[1]):
            similarity, score, label = self.memory(similarity, score, label)
        loss = self.of_pairs(similarity, score if self.by_order else score.to(similarity.dtype), label)
        if similarity.ndim == 1:
            return loss
        return LossParts({name: part.sum() for name, part in loss.items()}) if isinstance(loss, dict) else loss.sum()

    def _trains(self, width: int) -> bool:
        if not (torch.is_grad_enabled() and self.training and getattr(self.model, "training", True)):
            return False
        if self._width not in (None, width):
            raise ValueError(
                "memory_size must be 0 where embeddings are cut to several widths, as in a MatryoshkaLoss: cosines of "
                f"{width} and {self._width} dimensions are not to be compared"
            )
        self._width = width
        return True

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, D), (B, D) -> (B,), of which the loss is one; of several widths (K, B)."""
        return pairwise_cosine(a, b, dims=self.dims)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Any:
        raise NotImplementedError

    def targets(self, labels: Any, rows: int) -> tuple[Tensor, Tensor | None]:
        """(score, label) of a batch in any of its forms, label None where no loss looks at it."""
        label: Tensor | None = None
        if isinstance(labels, Mapping):
            score, label = labels.get("score"), labels.get("label")
        elif labels is not None and labels.ndim == 2 and labels.shape[1] == 2:
            label, score = labels[:, 0], labels[:, 1]
        else:
            score = labels
        if score is None or (self.needs_label and label is None):
            wanted = "a score and an NLI label" if self.needs_label else "a score"
            raise ValueError(
                f"{type(self).__name__} needs {wanted} for each pair: use raoe_train.ScoreLabelCollator "
                "with columns 'label' and 'score', or one column 'label' of [label, score]"
            )
        for name, column in (("score", score), ("label", label)):
            if column is not None and column.numel() != rows:
                raise ValueError(
                    f"{type(self).__name__} expects {rows} values of {name} (one per pair), "
                    f"got {column.numel()} with shape {tuple(column.shape)}"
                )
        score = score.reshape(-1).detach()
        score = score.int() if score.dtype == torch.bool else score
        label = label.reshape(-1).detach() if self.needs_label and label is not None else None
        # A look at the values makes a GPU wait, so there only the first batch is looked at.
        if score.device.type == "cpu" or not self._checked_labels:
            self._check(score, label)
            self._checked_labels = True
        return score, label.long() if label is not None else None

    def _check(self, score: Tensor, label: Tensor | None) -> None:
        if score.is_floating_point() and bool(score.isnan().any()):
            raise ValueError(f"{type(self).__name__} got a score that is NaN: remove or complete such pairs")
        if label is not None and bool(((label < 0) | (label != label.floor())).any() | label.isnan().any()):
            raise ValueError(
                f"{type(self).__name__} takes labels that are whole numbers from 0, larger = less related "
                f"(-1 marks a pair without one: remove it), got {label.unique().tolist()[:8]}"
            )

    def warn_small_batch(self, rows: int, margin: float) -> None:
        """Once, where no two ranks of a batch can be further apart than the margin."""
        if rows <= margin + 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of {rows} pairs has no two ranks further apart than margin={margin}: the rank part is 0",
                stacklevel=4,
            )
