"""sentence-transformers loss modules over raoe_kernels' pairwise losses.

Each is used with ``SentenceTransformerTrainer`` as sentence-transformers' own losses are. They see three numbers a
pair: the cosine that the encoder gives it, its score and, for the angular part, its NLI label. So a batch can be
encoded piece by piece (``mini_batch_size``) and ranked over all processes (``gather_across_devices``) exactly: both
give the gradient of the plain single-process batch.

Labels come as ``{"score": (B,), "label": (B,)}`` from ``raoe_train.ScoreLabelCollator``, as a (B, 2) tensor whose
rows are ``[label, score]``, or, where no NLI label is needed, as a (B,) tensor of scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from raoe_kernels import cosent_loss, gated_angular_loss, pairwise_cosine, raoe_loss, rank_margin_loss
from raoe_train.gathering import gather_pairs

__all__ = ["AnglELoss", "CoSENTLoss", "GatedAngularLoss", "RAOELoss", "RankMarginLoss"]


class LossParts(dict):
    """Named parts of one loss, each a differentiable scalar; the loss is their sum.

    The trainer adds them up and logs each one. Wrappers such as MatryoshkaLoss scale and add losses, so parts can be
    scaled and added, name by name.
    """

    def __rmul__(self, weight: float) -> LossParts:
        return LossParts({name: weight * part for name, part in self.items()})

    def __radd__(self, other: float) -> LossParts:
        if other != 0:
            raise TypeError(f"a number other than 0 belongs to none of the parts {', '.join(self)}; got {other!r}")
        return self

    def __add__(self, other: Mapping[str, Tensor]) -> LossParts:
        return LossParts({name: part + other[name] for name, part in self.items()})


class _PairLoss(CachedLossMixin, nn.Module):
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
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        if mini_batch_size is not None and mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1 or None, got {mini_batch_size!r}")
        self.model = model
        self.scale = scale
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = mini_batch_size is not None
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
            similarity, score, label = gather_pairs(similarity, score, label)
        return self._loss(similarity, score, label)

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """CachedLossMixin's hook: the loss of a batch whose embeddings come in mini-batches."""
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
        if isinstance(loss, dict):
            self._cached_parts.append({name: part.detach() for name, part in loss.items()})
            loss = torch.stack(list(loss.values())).sum()
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
        }

    @property
    def temperature(self) -> float:
        """1 / scale, as the literature on InfoNCE has it."""
        return 1.0 / self.scale

    def _forward_cached(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any) -> Tensor | dict[str, Tensor]:
        self._cached_parts: list[dict[str, Tensor]] = []
        total = self.forward_cached(sentence_features, labels)
        if len(self._cached_parts) != 1:  # no parts, or one set for each dimension of a MatryoshkaLoss
            return total
        # Only the total carries the hook that replays the mini-batches; the first part's value takes its place.
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
                f"{type(self).__name__} needs an NLI label for each pair: use raoe_train.ScoreLabelCollator with columns "
                "'label' and 'score', or one column 'label' of [label, score]"
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
                f"{type(self).__name__} got an NLI label that is negative, fractional or NaN (-1 marks a pair without one): "
                f"remove such pairs; labels are whole numbers from 0, larger = less related, got {label.unique().tolist()[:8]}"
            )

    def _warn_small_batch(self, rows: int, margin: float) -> None:
        if rows <= margin + 1 and "small" not in self._warned:
            self._warned.add("small")
            warnings.warn(
                f"a batch of {rows} pairs has no two ranks further apart than margin={margin}: the rank part is 0",
                stacklevel=4,
            )


class RankMarginLoss(_PairLoss):
    """RAOE's rank objective (Eq. 2): pairs whose scores rank more than `margin` apart must have cosines in that order.

    Args:
        model: the encoder.
        scale: tau; cosines are multiplied by it.
        margin: least distance of ranks, not itself included. It is counted within the (global) batch.
        ties: how equal scores rank, a name of ``scipy.stats.rankdata``'s; equal scores are never compared but
            under "ordinal".
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: rank over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        margin: float = 2,
        ties: str = "average",
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__(
            model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices
        )
        self.margin = margin
        self.ties = ties

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        self._warn_small_batch(similarity.shape[0], self.margin)
        return rank_margin_loss(similarity, score, margin=self.margin, tau=self.scale, ties=self.ties)

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "margin": self.margin, "ties": self.ties}

    @property
    def citation(self) -> str:
        return _RAOE_CITATION


class GatedAngularLoss(_PairLoss):
    """RAOE's angular objective (Eq. 3): of two pairs, the one with the larger label and the lower score must have the
    larger angle.

    Args:
        model: the encoder.
        scale: tau; angles (radians) are multiplied by it.
        gate: "label+score" as in the paper, "score" or "label" (its Table 8).
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: compare over the batches of all processes.

    Labels are whole numbers, larger = less related (entailment 0, neutral 1, contradiction 2).
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        gate: str = "label+score",
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__(
            model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices
        )
        self.gate = gate
        self.needs_label = gate != "score"

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        label = torch.zeros_like(score, dtype=torch.long) if label is None else label
        return gated_angular_loss(similarity, score, label, tau=self.scale, gate=self.gate)

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "gate": self.gate}

    @property
    def citation(self) -> str:
        return _RAOE_CITATION


class RAOELoss(_PairLoss):
    """RAOE (Eq. 4): ``rank_weight`` x rank margin + ``angle_weight`` x gated angular.

    ``forward`` returns both parts, weighted, as ``{"rank", "angle"}``: the trainer adds them and logs each. In your own
    loop: ``sum(loss(features, labels).values()).backward()``. With ``mini_batch_size`` the gradient of both runs through
    ``rank``, and inside a MatryoshkaLoss such a loss returns the sum alone.

    Args:
        model: the encoder.
        scale, margin, ties, gate: as in RankMarginLoss and GatedAngularLoss.
        rank_weight, angle_weight: weights of the two parts.
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: compare over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        margin: float = 2,
        rank_weight: float = 1.0,
        angle_weight: float = 1.0,
        ties: str = "average",
        gate: str = "label+score",
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__(
            model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices
        )
        self.margin = margin
        self.rank_weight = rank_weight
        self.angle_weight = angle_weight
        self.ties = ties
        self.gate = gate
        self.needs_label = gate != "score"

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> LossParts:
        self._warn_small_batch(similarity.shape[0], self.margin)
        label = torch.zeros_like(score, dtype=torch.long) if label is None else label
        rank, angle = raoe_loss(
            similarity,
            score,
            label,
            margin=self.margin,
            tau=self.scale,
            rank_weight=self.rank_weight,
            angle_weight=self.angle_weight,
            ties=self.ties,
            gate=self.gate,
            return_parts=True,
        )
        return LossParts(rank=rank, angle=angle)

    def get_config_dict(self) -> dict[str, Any]:
        own = ("margin", "rank_weight", "angle_weight", "ties", "gate")
        return {**super().get_config_dict(), **{name: getattr(self, name) for name in own}}

    @property
    def citation(self) -> str:
        return _RAOE_CITATION


class CoSENTLoss(_PairLoss):
    """sentence-transformers' CoSENTLoss, same arguments and values, with gradient caching and gathering.

    Args:
        model: the encoder.
        scale: similarities are multiplied by it.
        similarity_fct: (B, D), (B, D) -> (B,).
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: rank over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = util.pairwise_cos_sim,
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__(
            model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices
        )
        self.similarity_fct = similarity_fct

    def _similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return pairwise_cosine(a, b) if self.similarity_fct is util.pairwise_cos_sim else self.similarity_fct(a, b)

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return cosent_loss(similarity, score, tau=self.scale)

    def get_config_dict(self) -> dict[str, Any]:
        name = getattr(self.similarity_fct, "__name__", repr(self.similarity_fct))
        return {**super().get_config_dict(), "similarity_fct": name}

    @property
    def citation(self) -> str:
        return _COSENT_CITATION


class AnglELoss(CoSENTLoss):
    """sentence-transformers' AnglELoss: CoSENT over ``pairwise_angle_sim``, same arguments and values.

    More than two columns are an anchor, its positive and negatives: the positive's score is the label (1 without
    one), each negative's is 1 minus that.

    Args:
        model: the encoder.
        scale: similarities are multiplied by it.
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: rank over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__(
            model,
            scale,
            util.pairwise_angle_sim,
            mini_batch_size=mini_batch_size,
            gather_across_devices=gather_across_devices,
        )

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any) -> Tensor | dict[str, Tensor]:
        if len(embeddings) > 2:
            anchor, *others = embeddings
            positive = anchor.new_ones(len(anchor)) if labels is None else self._targets(labels, len(anchor))[0]
            labels = torch.cat([positive, *[1 - positive] * (len(others) - 1)])
            embeddings = [anchor.repeat(len(others), 1), torch.cat(others)]
        return super().compute_loss_from_embeddings(embeddings, labels)

    @property
    def citation(self) -> str:
        return _ANGLE_CITATION


_RAOE_CITATION = """
@misc{zhou-raoe,
    title = {Rank-Awareness and Angular Constraints: A New Perspective on Learning Sentence Embeddings from {NLI} Data},
    author = {Zhou, Zicheng and Huang, Min and Miao, Qinghai}
}
"""
_COSENT_CITATION = """
@article{huang2024cosent,
    title = {{CoSENT}: Consistent Sentence Embedding via Similarity Ranking},
    author = {Huang, Xiang and Peng, Hao and Zou, Dongcheng and Liu, Zhiwei and Li, Jianxin and Liu, Kay and Wu, Jia
        and Su, Jianlin and Yu, Philip S.},
    journal = {IEEE/ACM Transactions on Audio, Speech, and Language Processing},
    year = {2024},
    doi = {10.1109/TASLP.2024.3402087}
}
"""
_ANGLE_CITATION = """
@inproceedings{li2024angle,
    title = {{AoE}: Angle-optimized Embeddings for Semantic Textual Similarity},
    author = {Li, Xianming and Li, Jing},
    booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics},
    year = {2024},
    doi = {10.18653/v1/2024.acl-long.101}
}
"""
