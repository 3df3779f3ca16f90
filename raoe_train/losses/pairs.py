"""Losses of scored pairs: what they share, CoSENT, AnglE and Pearson's correlation, and the scale that fits one."""

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, util
from torch import Tensor
from torch.nn import functional

from raoe_kernels import cosent_loss, pairwise_cosine
from raoe_train.config import PositiveFloat
from raoe_train.encoders.embed import encode_sentences
from raoe_train.losses.base import CachedLoss, OneSweep, carrying
from raoe_train.losses.gathering import gather_pairs
from raoe_train.losses.reads import SCORED_PAIRS, needs_label

if TYPE_CHECKING:
    from datasets import Dataset


class LossParts(dict):
    """Named parts of one loss, each a differentiable scalar; the loss is their sum.

    The trainer adds them up and logs each one. Wrappers such as MatryoshkaLoss and AdaptiveLayerLoss scale and add
    losses, so parts can be scaled and added, name by name; a tensor that is added is the part "others".
    """

    def __rmul__(self, weight: float) -> "LossParts":
        return LossParts({name: weight * part for name, part in self.items()})

    __mul__ = __rmul__

    def __truediv__(self, number: float) -> "LossParts":
        return self * (1 / number)

    def __radd__(self, zero: float) -> "LossParts":
        return self  # of sum()

    def __add__(self, other: Mapping[str, Tensor] | Tensor) -> "LossParts":
        more = other if isinstance(other, Mapping) else {"others": other}  # what a wrapper adds of its own
        return LossParts({name: self.get(name, 0) + more.get(name, 0) for name in {**self, **more}})


class PairLoss(CachedLoss):
    """A loss of scored pairs: a subclass implements ``of_pairs(similarity, score, label)``, all (B,), label None unless
    `needs_label`; it is the loss, (), or LossParts. Labels see raoe_train.losses. Of one that is a OneSweep, too,
    similarity may be (K, B), and the losses (K,).
    """

    reads = SCORED_PAIRS
    by_order = False  # whether scores count by their order alone; others get them in similarity's dtype
    dims: tuple[int, ...] | None = None  # see OneSweep

    def __init__(self, model: Any, scale: PositiveFloat = 20.0, **cached: Any) -> None:
        super().__init__(model, scale, **cached)
        self._checked_labels = False
        self._warned = False

    @property
    def needs_label(self) -> bool:
        """Whether each pair must have an NLI label."""
        return needs_label({"gate": getattr(self, "gate", "score")})

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
        if isinstance(labels, (list, np.ndarray)):
            labels = torch.as_tensor(labels, device=embeddings[0].device)
        score, label = self.targets(labels, embeddings[0].shape[0])
        similarity = self.similarity(embeddings[0], embeddings[1])
        if self.gather_across_devices:
            similarity, score, label = gather_pairs(similarity.movedim(-1, 0), score, label)
            similarity = similarity.movedim(0, -1)
        loss = self.of_pairs(similarity, score if self.by_order else score.to(similarity.dtype), label)
        if similarity.ndim == 1:
            return loss
        return LossParts({name: part.sum() for name, part in loss.items()}) if isinstance(loss, dict) else loss.sum()

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, D), (B, D) -> (B,), of which the loss is one; of several widths (K, B)."""
        return pairwise_cosine(a, b, dims=self.dims)

    @abstractmethod
    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Any:
        """The loss, (), or LossParts of (B,) columns; label is None unless needs_label."""

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
                f"{type(self).__name__} needs {wanted} for each pair, in columns 'score' and 'label' (which "
                "raoe_train.Trainer collates, and raoe_train.ScoreLabelCollator for other trainers) or [label, score]"
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
        if score.device.type != "cpu" and self._checked_labels:
            return score, None if label is None else label.long()
        self._checked_labels = True
        if score.is_floating_point() and bool(score.isnan().any()):
            raise ValueError(f"{type(self).__name__} got a score that is NaN: remove or complete such pairs")
        if label is not None and bool(((label < 0) | (label != label.floor())).any() | label.isnan().any()):
            raise ValueError(
                f"{type(self).__name__} takes labels that are whole numbers from 0, larger = less related "
                f"(-1 marks a pair without one: remove it), got {label.unique().tolist()[:8]}"
            )
        return score, None if label is None else label.long()

    def warn_small_batch(self, rows: int, margin: float) -> None:
        """Once, where no two ranks of a batch can be further apart than the margin."""
        if rows <= margin + 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of {rows} pairs has no two ranks further apart than margin={margin}: the rank part is 0",
                stacklevel=4,
            )


class CoSENTLoss(OneSweep, PairLoss):
    """sentence-transformers' CoSENTLoss, same arguments and values, with gradient caching and gathering.

    Args:
        model, scale, cached: see OneSweep.
        similarity_fct: (B, D), (B, D) -> (B,). Another than the cosine has no matryoshka_dims: put it into a
            MatryoshkaLoss.
    """

    by_order = True
    cites = ("huang2024cosent",)

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = util.pairwise_cos_sim,
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        self.similarity_fct = similarity_fct
        if self.dims and similarity_fct is not util.pairwise_cos_sim:
            raise ValueError("matryoshka_dims are of cosines: another similarity_fct needs a MatryoshkaLoss")

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return super().similarity(a, b) if self.similarity_fct is util.pairwise_cos_sim else self.similarity_fct(a, b)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return cosent_loss(similarity, score, scale=self.scale)


class AnglELoss(PairLoss):
    """sentence-transformers' AnglELoss: CoSENT over ``pairwise_angle_sim``, same arguments and values; see CachedLoss.

    More than two columns are an anchor, its positive and negatives: the positive's score is the label (1 without one),
    each negative's is 1 minus that.
    """

    by_order = True
    cites = ("li2024angle",)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return util.pairwise_angle_sim(a, b)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return cosent_loss(similarity, score, scale=self.scale)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        if len(embeddings) > 2:
            anchor, *others = embeddings
            positive = anchor.new_ones(len(anchor)) if labels is None else self.targets(labels, len(anchor))[0]
            labels = torch.cat([positive, *[1 - positive] * (len(others) - 1)])
            embeddings = [anchor.repeat(len(others), 1), torch.cat(others)]
        return super().compute_loss_from_embeddings(embeddings, labels)


class PearsonLoss(OneSweep, PairLoss):
    """1 - Pearson's correlation of the batch's cosines and scores (the loss of Pcc-tuning, Zhang and Li 2024).

    It is the same for scores times any positive number and plus any other, so that it needs neither their scale nor a
    temperature, and `scale` has no part in it. A batch whose scores are all equal teaches nothing.
    """

    cites = ("zhang2024pcctuning",)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        wide = torch.promote_types(similarity.dtype, torch.float32)
        ours, theirs = (each.to(wide) - each.to(wide).mean(-1, keepdim=True) for each in (similarity, score))
        # eps: where all cosines are nearly equal, their differences are rounding, and no direction to go into
        return 1 - functional.cosine_similarity(ours, theirs, dim=-1, eps=1e-4)


SCALES = tuple(round(2 ** (k / 4), 2) for k in range(0, 25))  # 1, 1.19, … 64
PAIRS = 1024  # read at most


def calibrate(
    model: SentenceTransformer, loss: PairLoss, pairs: "Dataset", *, batch_size: int = 64, seed: int = 42, **encode: Any
) -> float:
    """The scale, of 25 from 1 to 64, at which a loss of scored pairs is smallest before training.

    Above that scale the cheapest way down for the gradient is to bring all cosines together (docs/study.md). The
    paper's 20 fits scores that another encoder gave; scores that people gave are noisier and want a smaller scale.

    Args:
        model: a SentenceTransformer, which reads up to 1,024 pairs (or one batch, if that is larger).
        loss: a loss of scored pairs, of any scale: ``rt.losses.RAOELoss(model)``.
        pairs: a datasets.Dataset of two columns of texts, `score` and, where the loss needs it, `label`.
        batch_size: pairs of a batch, as in training.
        seed: of the pairs that are drawn.
        encode: keywords of the model's `encode`, such as the prompt that training uses, or {column: keyword}.

    Raises:
        ValueError: another loss, or other columns.
    """
    from datasets import Dataset

    if not isinstance(pairs, Dataset):
        raise ValueError(f"pairs must be a datasets.Dataset, got {type(pairs).__name__}")
    texts = [name for name in pairs.column_names if name not in ("score", "label")]
    if not isinstance(loss, PairLoss) or len(texts) != 2 or "score" not in pairs.column_names:
        raise ValueError(
            f"calibrate takes a loss of scored pairs and two columns of texts with a score, got {type(loss).__name__} "
            f"and columns {', '.join(pairs.column_names)}"
        )
    rows = min(len(pairs), max(PAIRS, batch_size))
    drawn = pairs.shuffle(seed=seed, keep_in_memory=True).select(range(rows))

    def embedded(name: str) -> Tensor:
        its = {key: value.get(name) if isinstance(value, dict) else value for key, value in encode.items()}
        return torch.as_tensor(encode_sentences(model, drawn[name][:], 64, **its))

    columns = [*map(embedded, texts)]
    targets = {name: torch.tensor(drawn[name][:]) for name in ("score", "label") if name in drawn.column_names}
    size = min(batch_size, rows)
    # whole batches only: a short one has another, easier problem
    batches = [slice(first, first + size) for first in range(0, rows - size + 1, size)]
    trial = copy.copy(loss)
    trial.dims, trial.gather_across_devices = None, False

    def total(scale: float) -> float:
        trial.scale, found = scale, 0.0
        for batch in batches:
            with torch.no_grad():
                value = trial.compute_loss_from_embeddings(
                    [column[batch] for column in columns], {name: column[batch] for name, column in targets.items()}
                )
            found += float(sum(value.values()) if isinstance(value, dict) else value)
        return found

    return min(SCALES, key=total)
