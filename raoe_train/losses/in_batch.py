"""Losses of in-batch contrast: what they share, SigLIP's sigmoid loss and GISTEmbed."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import info_nce_loss, sigmoid_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.distillation import teacher_embeddings
from raoe_train.losses.gathering import averaged, gather_rows, own_rows
from raoe_train.losses.reads import TRIPLETS, TRIPLETS_WITH_TEXTS

LEARNED = (1.0, 100.0)  # bounds of a learned scale: CLIP's
OF_ANCHORS = {"query_to_query", "doc_to_query"}  # directions that look for anchors
MarginStrategy = Literal["absolute", "relative"]
Ids = tuple[Tensor, Tensor] | None
"""Ids of all processes' anchors and columns, equal where two texts are no negatives; None where all are distinct."""


class InBatchLoss(CachedLoss):
    """Each anchor's positive against the rest of the batch, over ``info_nce_loss``.

    Columns are anchor, positive and any number of hard negatives, as many rows each. Logits come and go by chunks:
    memory is that of the embeddings.

    Args:
        model, scale, cached: see CachedLoss. With gather_across_devices negatives, and duplicates, are those of all
            processes' batches. Each process returns the mean over its own pairs: the mean over processes, of the loss
            and, in DistributedDataParallel, of the gradient, is the whole batch's.
        learn_scale: learn the scale, from `scale` on, within 1 and 100 as CLIP's, by its logarithm, the parameter
            `log_scale`. An encoder's learning rate is small for it: see training.learning_rate_mapping.
        mask_duplicates: leave false negatives out: texts are not negatives of each other that a chain of pairs links,
            an anchor with its positive; an anchor's own positive always counts. Texts are the same where the encoder
            gets the same tokens (prompts included, after truncation). Columns that are not texts are an error.
    """

    reads = TRIPLETS

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        *,
        learn_scale: bool = False,
        mask_duplicates: bool = True,
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        low, high = LEARNED
        if learn_scale and not low <= scale <= high:
            raise ValueError(f"learn_scale begins at a scale from {low:g} to {high:g}, got scale {scale!r}")
        self.learn_scale = learn_scale
        self.mask_duplicates = mask_duplicates
        if learn_scale:
            self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @property
    def current_scale(self) -> float:
        """The scale now, a number."""
        return float(self._kept_within().detach().exp()) if self.learn_scale else self.scale

    def _kept_within(self) -> Tensor:
        self.log_scale.data.clamp_(*map(math.log, LEARNED))
        return self.log_scale

    def differentiable_scale(self) -> float | Tensor:
        """The scale now, with its gradient where it is learned; for one use a forward: processes average it there."""
        return averaged(self._kept_within()).exp() if self.learn_scale else self.current_scale

    def beside(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        if not self.mask_duplicates:
            return {"labels": labels}
        # Mini-batches are slices of the columns, and the encoder's modules may change them.
        return {"labels": labels, "texts": torch.stack([text_ids(column) for column in features], dim=1)}

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Any = None, *, texts: Tensor | None = None
    ) -> Tensor:
        """The loss, (), of (B, D) embeddings of the columns.

        `texts` are (B, columns) integers, equal where texts are, across columns (and processes); without them no
        duplicate is known, and none is masked.
        """
        rows = [len(column) for column in embeddings]
        if len(rows) < 2 or len(set(rows)) > 1:
            raise ValueError(
                f"{type(self).__name__} needs columns anchor, positive (the anchors again, as SimCSE does) and any "
                f"number of negatives, with a text in each row, got columns of {', '.join(map(str, rows))} rows"
            )
        return self.of_columns(embeddings, labels, self._duplicate_ids(texts))

    @abstractmethod
    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        """Mean over the rows of this process."""

    def gathered(self, column: Tensor) -> Tensor:
        """The rows of all processes' columns, where they are compared; of one column, since blocks of rows of several
        would not stay in order."""
        return gather_rows(column) if self.gather_across_devices else column

    def targets(self, own: Tensor) -> Tensor:
        """(B,): where this process's rows are among them."""
        return own_rows(own) if self.gather_across_devices else torch.arange(len(own), device=own.device)

    def contrast(
        self,
        embeddings: list[Tensor],
        ids: Ids,
        guide: list[Tensor] | None = None,
        directions: tuple[str, ...] = ("query_to_doc",),
        **form: Any,
    ) -> Tensor:
        """info_nce_loss of this process's rows and all processes' columns, in any form of the op; `guide` are another
        encoder's embeddings of the columns, (B, G)."""
        own, targets = embeddings[0], self.targets(embeddings[0])
        positives, *others = map(self.gathered, embeddings[1:])
        anchors, rows = None, targets  # rows of the anchors that the op is given
        if len(positives) > len(own) and OF_ANCHORS & {*directions}:
            anchors, rows = self.gathered(own), torch.arange(len(positives), device=own.device)
        if ids is not None:
            form["ignore"] = (ids[0][rows], ids[1])
        if guide is not None:
            first, second, *rest = map(self.gathered, guide)
            form["guide"] = (first[rows], second, *([torch.cat(rest)] if others else []))
        negatives = torch.cat(others) if others else None
        form.update(targets=targets, all_anchors=anchors, directions=directions)
        return info_nce_loss(own, positives, negatives, **form)

    def _duplicate_ids(self, texts: Tensor | None) -> Ids:
        """None where no text occurs twice, as in most batches: comparing ids is one more pass over the logits. A GPU
        waits for it."""
        if texts is None or not self.mask_duplicates:
            return None
        of_anchors, of_columns = related_as_ids(self.gathered(texts))
        twice = max(torch.bincount(of_anchors).max(), torch.bincount(of_columns)[of_anchors].max()) > 1
        return (of_anchors, of_columns) if twice else None


class SigmoidLoss(InBatchLoss):
    """Is a text the anchor's positive? Asked of each anchor with the positives and negatives of the whole batch, over
    ``sigmoid_loss``.

    The value is SigLIP's (Zhai et al. 2023), open_clip's SigLipLoss, where no text occurs twice.

    Args:
        model, scale, cached: see InBatchLoss.
        bias: what is added to scale x the cosine. At -10 nearly all pairs are answered right when training begins: all
            but one of a batch are negatives.
        learn_scale: scale and bias are parameters, `log_scale` and `logit_bias`; see
            training.learning_rate_mapping {log_scale|logit_bias: 1e-3}.
    """

    cites: ClassVar[tuple[str, ...]] = ("zhai2023sigmoid",)

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 10.0,
        *,
        bias: float = -10.0,
        learn_scale: bool = True,
        **contrastive: Any,
    ) -> None:
        super().__init__(model, scale, learn_scale=learn_scale, **contrastive)
        if not math.isfinite(bias):
            raise ValueError(f"bias must be a number, got {bias!r}")
        self.bias = bias
        if learn_scale:
            self.logit_bias = nn.Parameter(torch.tensor(float(bias)))

    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        columns, targets = torch.cat([*map(self.gathered, embeddings[1:])]), self.targets(embeddings[0])
        form: dict[str, Any] = {"targets": targets, "ignore": ids and (ids[0][targets], ids[1])}
        form["bias"] = averaged(self.logit_bias) if self.learn_scale else self.bias
        return sigmoid_loss(embeddings[0], columns, scale=self.differentiable_scale(), **form)


class GISTLoss(InBatchLoss):
    """In-batch contrast without the columns that a guide finds too similar to be negatives (Solatorio 2024), over
    ``info_nce_loss``.

    The value is that of sentence-transformers' GISTEmbedLoss and CachedGISTEmbedLoss, with scale 1 / temperature, where
    no text occurs twice. The guide reads the columns' texts from labels, as a DistillationLoss's teacher does.

    Args:
        model, scale, learn_scale, cached: see InBatchLoss. Under gather_across_devices anchors are contrasted with
            those of all processes (sentence-transformers': of their own).
        embed: the guide, see DistillationLoss.
        margin_strategy: what margin is, absolute or relative; a column is left out where the guide's cosine is above
            that of the row's own pair, less margin, or less margin times its absolute value.
        margin: how far below the positive's a column's similarity must be. Below 0 the row's own pair still counts,
            which sentence-transformers then leaves out.
        contrast_anchors: anchors are each other's negatives, too.
        contrast_positives: positives are each other's negatives, too.
    """

    reads = TRIPLETS_WITH_TEXTS
    asks_teacher = True
    cites: ClassVar[tuple[str, ...]] = ("solatorio2024gistembed",)

    def __init__(
        self,
        model: SentenceTransformer,
        embed: Callable[[Sequence[str]], np.ndarray],
        scale: PositiveFloat = 100.0,
        *,
        margin_strategy: MarginStrategy = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        **contrastive: Any,
    ) -> None:
        super().__init__(model, scale, **contrastive)
        if not math.isfinite(margin):
            raise ValueError(f"margin must be a number, got {margin!r}")
        self.margin_strategy = margin_strategy
        self.margin = margin
        self.contrast_anchors = contrast_anchors
        self.contrast_positives = contrast_positives
        self._embed = embed
        self._guided: tuple[Any, list[Tensor]] = (None, [])

    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        if labels is None or labels is not self._guided[0]:  # a MatryoshkaLoss asks more than once
            self._guided = (labels, teacher_embeddings(self._embed, labels, embeddings))
        directions = ["query_to_doc"]
        directions += ["query_to_query"] * self.contrast_anchors + ["positive_to_positive"] * self.contrast_positives
        form: dict[str, Any] = {"guide_margin": self.margin, "margin_strategy": self.margin_strategy}
        form["scale"] = self.differentiable_scale()
        return self.contrast(embeddings, ids, self._guided[1], tuple(directions), **form)


def related_as_ids(texts: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of anchors (N,) and of columns (C,), from (N, columns) ids of the whole batch's texts: equal where a chain of
    pairs of an anchor and its positive links two texts (connected components): of (A, B) and (C, B) also A and C."""
    number = torch.unique(texts, return_inverse=True)[1]
    root = torch.arange(texts.numel(), device=texts.device)
    first, second = number[:, 0], number[:, 1]
    ends = torch.cat([first, second])
    while True:
        lower = torch.minimum(root[first], root[second])
        found = root.scatter_reduce(0, ends, torch.cat([lower, lower]), "amin")
        found = found[found]  # half of the way to the smallest at a step
        if torch.equal(found, root):
            return root[number[:, 0]], root[number[:, 1:].T.reshape(-1)]
        root = found


def text_ids(features: dict[str, Tensor]) -> Tensor:
    """(B,) int64, equal where the real tokens of two rows are: in any column, process and padding.

    The sum over the tokens of a 64-bit hash (splitmix64's finaliser) of token and position: two different texts are
    taken for one with a probability of 2^-64.
    """
    tokens = features.get("input_ids")
    texts = features.get("modality", "text") in ("text", "message") and "pixel_values" not in features
    if not isinstance(tokens, Tensor) or not texts:
        raise ValueError(
            "mask_duplicates compares texts by their input_ids, and a column is not (only) text: "
            "use InfoNCELoss(..., mask_duplicates=False)"
        )
    if "cu_seq_lens_q" in features or "offsets" in features:  # texts one after another: flattened, or StaticEmbedding
        starts = features["cu_seq_lens_q"][:-1] if "cu_seq_lens_q" in features else features["offsets"]
        tokens, starts = tokens.reshape(-1), starts.long()
        place = torch.arange(len(tokens), device=tokens.device)
        row = torch.searchsorted(starts, place, right=True) - 1
        return tokens.new_zeros(len(starts), dtype=torch.long).index_add(0, row, _mixed(tokens, place - starts[row]))
    real = features.get("attention_mask", torch.ones_like(tokens)).bool()
    return _mixed(tokens, real.cumsum(1) - 1).masked_fill(~real, 0).sum(1)


def _mixed(tokens: Tensor, positions: Tensor) -> Tensor:
    x = (tokens.long() << 32) + positions + 1
    # int64 wraps, and >> keeps the sign, which the mask takes away.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))
