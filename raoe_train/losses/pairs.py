"""Losses for scored pairs (base class, CoSENT, AnglE and Pearson's correlation), and calibration of their scale."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from sentence_transformers import SentenceTransformer, util
from torch import Tensor
from torch.nn import functional

from raoe_kernels import cosent_loss, pairwise_cosine
from raoe_train.config import PositiveFloat
from raoe_train.encoders.embed import encode_sentences
from raoe_train.losses.base import CachedLoss, LossParts, OneSweep, gather_rows
from raoe_train.losses.collators import SCORED_PAIRS


class PairLoss(CachedLoss):
    """A loss for scored pairs. A subclass implements ``of_pairs(similarity, score, label)``, which returns a scalar
    loss or LossParts from (B,) tensors. `label` is None unless the loss needs NLI labels. `raoe_train.losses` lists the
    kinds of labels that pair losses accept. If the subclass also inherits from OneSweep, `similarity` can have shape
    (K, B) for K widths, and the loss then has shape (K,).

    Attributes:
        exact_scores: whether of_pairs gets scores in their own dtype, instead of the dtype of `similarity`.
        reads_order: whether the loss reads only the order of the scores. If so, when a batch is prepared on the CPU,
            its scores are replaced by float32 ranks, because all kernels sort ranks faster than float64 scores.
            Subclasses do not inherit reads_order, because they may read the values of scores: each class that reads
            only the order must set reads_order itself.
    """

    reads = SCORED_PAIRS
    exact_scores = False
    reads_order = False
    dims: tuple[int, ...] | None = None  # see OneSweep
    _checked_labels = False

    def prepare_labels(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        # On the CPU, all batches are checked. On a GPU, a check would wait for the device, so only the first batch is
        # checked.
        on_gpu = any(getattr(x, "is_cuda", False) for x in features[0].values())
        if labels is not None and not (on_gpu and self._checked_labels):
            self._checked_labels = True
            score, label = self.targets(send_to_device(labels, "cpu"))
            # Ranks of several processes are not comparable. If there are more than two columns, AnglELoss reads values.
            keeps_values = self.gather_across_devices or len(features) != 2 or on_gpu or score.is_complex()
            if vars(type(self)).get("reads_order") and not keeps_values:
                ranks = torch.unique(score, return_inverse=True)[1]  # float32 holds integers up to 2^24 exactly
                labels = {"score": ranks.float(), "label": label}
        return super().prepare_labels(features, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        """Return the loss for two columns of (B, D) embeddings.

        Raises:
            ValueError: the number of columns is not 2, the number of labels is not B, or a label is NaN.
        """
        if len(embeddings) != 2:
            raise ValueError(f"{type(self).__name__} expects 2 columns of sentences, got {len(embeddings)}")
        targets = self.targets(labels, len(embeddings[0]))
        score, label = send_to_device(targets, embeddings[0].device)
        similarity = self.similarity(embeddings[0], embeddings[1])
        if self.gather_across_devices:
            similarity = gather_rows(similarity.movedim(-1, 0)).movedim(0, -1)
            score, label = gather_rows(score), None if label is None else gather_rows(label)
        loss = self.of_pairs(similarity, score if self.exact_scores else score.to(similarity.dtype), label)
        if similarity.ndim == 1:
            return loss
        if isinstance(loss, dict):
            return LossParts({name: part.sum() for name, part in loss.items()})
        return loss.sum()

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the similarities of B pairs of embeddings, as a tensor of shape (B,) or, for K widths, (K, B)."""
        return pairwise_cosine(a, b, dims=self.dims)

    @abstractmethod
    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Any:
        """Return the scalar loss or LossParts from (B,) tensors. `label` is None unless the loss needs NLI labels."""

    def targets(self, labels: Any, rows: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return (score, label), each of shape (B,), from any kind of labels. `label` is None unless the loss needs NLI
        labels. If the labels are on a GPU, their values are not checked."""
        name, needs_label = type(self).__name__, self.needs_label(vars(self))
        if isinstance(labels, Mapping):
            score, label = (self._tensor(labels.get(key)) for key in ("score", "label"))
        else:
            score, label = self._tensor(labels), None
            if score is not None and score.ndim == 2 and score.shape[1] == 2:
                label, score = score.unbind(1)
        if score is None or (needs_label and label is None):
            needed = "a score and an NLI label" if needs_label else "a score"
            advice = "use raoe_train.ScoreLabelCollator with columns 'score' and 'label', or rows [label, score]"
            raise ValueError(f"{name} needs {needed} for each pair: {advice}")
        for key, column in (("score", score), ("label", label)):
            if column is not None and rows not in (None, column.numel()):
                got = f"{rows} values of {key} (one for each pair), got {column.numel()}"
                raise ValueError(f"{name} needs {got}")
        score = score.reshape(-1).detach()
        score = score.int() if score.dtype == torch.bool else score
        label = label.reshape(-1).detach() if needs_label and label is not None else None
        if score.device.type == "cpu":
            if score.is_floating_point() and bool(score.isnan().any()):
                raise ValueError(f"{name} got a NaN score: remove pairs whose score is NaN")
            if label is not None and bool((~(label >= 0) | (label != label.floor())).any()):
                rule = "needs labels that are whole numbers from 0 (larger = less related)"
                advice = "remove pairs without a label"
                raise ValueError(f"{name} {rule}, got {label.unique().tolist()[:8]}: {advice}")
        return score, None if label is None else label.long()

    def _tensor(self, values: Any) -> Tensor | None:
        try:
            return values if values is None or torch.is_tensor(values) else torch.as_tensor(values, device="cpu")
        except (ValueError, TypeError, RuntimeError):
            form = 'numbers, one for each pair, or {"score": numbers, "label": numbers}'
            raise ValueError(f"labels of {type(self).__name__} must be {form}, got {values!r:.100}") from None


class CoSENTLoss(OneSweep, PairLoss):
    """sentence-transformers' CoSENTLoss, with the same arguments and loss values, plus the arguments of CachedLoss.

    Args:
        model, scale, **cached: arguments of OneSweep.
        similarity_fct: function from two (B, D) tensors to (B,) similarities. matryoshka_dims works only with the
            default function (cosine similarity); with any other function, use MatryoshkaLoss.
    """

    exact_scores = reads_order = True
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
            raise ValueError("matryoshka_dims works only with cosines: for another similarity_fct, use MatryoshkaLoss")

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return super().similarity(a, b) if self.similarity_fct is util.pairwise_cos_sim else self.similarity_fct(a, b)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return cosent_loss(similarity, score, scale=self.scale)


class AnglELoss(PairLoss):
    """sentence-transformers' AnglELoss: CoSENT over ``pairwise_angle_sim``, with the same arguments and loss values.

    More than two columns are read as an anchor, its positive and its negatives. The score of the positive is the label,
    or 1 if there are no labels. The score of each negative is 1 minus the score of the positive. For the arguments, see
    CachedLoss.
    """

    exact_scores = reads_order = True
    cites = ("li2024angle",)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        # before version 6.2, sentence-transformers saves embeddings for backward, even those from inference mode
        a, b = (x.clone() if x.is_inference() else x for x in (a, b))
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
    """1 minus Pearson's correlation between the batch's cosines and scores (the loss of Pcc-tuning, Zhang and Li 2024).

    The loss does not change if the same number is added to all scores, or if all scores are multiplied by a positive
    number. The range of the scores therefore does not matter. PearsonLoss has no temperature, and ignores `scale`. If
    all scores in a batch are equal, the gradient is 0.
    """

    exact_scores = True
    cites = ("zhang2024pcctuning",)

    def of_pairs(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        cosines = similarity.to(torch.promote_types(similarity.dtype, torch.float32))
        cosines = cosines - cosines.mean(-1, keepdim=True)
        scores = score.to(torch.float32 if score.device.type == "mps" else torch.float64)  # no float64 on Apple's GPUs
        scores = scores - scores.mean()
        scores = (scores / scores.abs().max().clamp_min(torch.finfo(scores.dtype).tiny)).to(cosines.dtype)
        # eps: if all cosines are nearly equal, their differences are rounding errors, and the gradient would be useless
        return 1 - functional.cosine_similarity(cosines, scores, dim=-1, eps=1e-4)


SCALES = tuple(round(2 ** (k / 4), 2) for k in range(0, 25))  # 1, 1.19, … 64
PAIRS = 1024  # calibrate encodes this many pairs, or one batch if a batch is larger


def calibrate(
    model: SentenceTransformer, loss: PairLoss, pairs: Dataset, *, batch_size: int = 64, seed: int = 42, **encode: Any
) -> float:
    """Find the scale, among 25 values from 1 to 64, at which a loss for scored pairs is smallest before training.

    At larger scales, training can lower the loss by making all cosines similar (docs/lab/study.md). The RAOE paper's
    scale of 20 suits scores that another encoder computed. Human scores are noisier and need a smaller scale.

    Args:
        model: a SentenceTransformer, which encodes up to 1,024 pairs (or one batch, if a batch is larger).
        loss: a loss for scored pairs with any scale, such as ``rt.losses.RAOELoss(model)``.
        pairs: a datasets.Dataset with two text columns, `score` and, if the loss needs it, `label`.
        batch_size: pairs in a batch, as in training.
        seed: seed for drawing pairs.
        encode: arguments of the model's `encode`, such as the prompt used in training. A value can be {column: value}.

    Raises:
        ValueError: `loss` is not a loss for scored pairs, or `pairs` lacks a column.
    """
    if not hasattr(model, "training"):
        raise ValueError(f"calibrate needs a loaded encoder, got {model!r}: pass rt.load_encoder(name)")
    if not isinstance(pairs, Dataset):
        raise ValueError(f"pairs must be a datasets.Dataset, got {type(pairs).__name__}")
    texts = [name for name in pairs.column_names if name not in ("score", "label")]
    if not isinstance(loss, PairLoss):
        raise ValueError(f"calibrate needs a loss for scored pairs, such as CoSENTLoss, got {type(loss).__name__}")
    if len(texts) != 2 or "score" not in pairs.column_names:
        names = ", ".join(pairs.column_names)
        raise ValueError(f"pairs must have two text columns and a column 'score', got columns {names}")
    rows = min(len(pairs), max(PAIRS, batch_size))
    sample = pairs.shuffle(seed=seed, keep_in_memory=True).select(range(rows))

    def embed(name: str) -> Tensor:
        options = {key: value.get(name) if isinstance(value, dict) else value for key, value in encode.items()}
        return torch.from_numpy(encode_sentences(model, sample[name][:], 64, **options))

    columns = [embed(name) for name in texts]
    labels = [name for name in sample.column_names if name not in texts]
    targets = {name: torch.tensor(sample[name][:], device="cpu") for name in labels}
    size = min(batch_size, rows)
    trial = copy.copy(loss)
    trial.dims, trial.gather_across_devices = None, False

    @torch.no_grad()
    def total(scale: float) -> float:
        trial.scale, result = scale, 0.0
        # use only full batches, because losses of different batch sizes are not comparable
        for first in range(0, rows - size + 1, size):
            batch = slice(first, first + size)
            embeddings = [column[batch] for column in columns]
            labels = {name: column[batch] for name, column in targets.items()}
            value = trial.compute_loss_from_embeddings(embeddings, labels)
            result += float(sum(value.values()) if isinstance(value, dict) else value)
        return result

    return min(SCALES, key=total)
