"""What losses of in-batch contrast share: columns of all processes, their texts, and a scale that may change."""

import math
from abc import abstractmethod
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import info_nce_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.gathering import averaged, gather_rows, process_rows
from raoe_train.losses.reads import TRIPLETS

LEARNED = (1.0, 100.0)  # bounds of a learned scale: CLIP's
OF_ANCHORS = {"query_to_query", "doc_to_query"}  # directions that look for anchors


class InBatchLoss(CachedLoss):
    """Each anchor's positive against the rest of the batch, over ``info_nce_loss``.

    Columns are anchor, positive and any number of hard negatives, as many rows each. Logits come and go by chunks:
    memory is that of the embeddings.

    Args:
        model, scale, cached: see CachedLoss. With gather_across_devices negatives, and duplicates, are those of all
            processes' batches. Each process computes the rows of its own pairs and returns their part of the loss times
            the number of processes: the mean over processes, of the loss and, in DistributedDataParallel, of the
            gradient, is the whole batch's.
        learn_scale: learn the scale, from `scale` on, within 1 and 100 as CLIP's. Its logarithm is the parameter
            `log_scale`. An encoder's learning rate is small for it: training.learning_rate_mapping {log_scale: 1e-3}
            gives it another.
        mask_duplicates: leave false negatives out: texts are not negatives of each other that a chain of pairs links,
            an anchor with its positive; an anchor's own positive always counts. Texts are the same where the encoder
            gets the same tokens (prompts included, after truncation). Columns that are not texts are an error.

    Raises:
        ValueError: see CachedLoss; learn_scale with a scale beyond 1 and 100.
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
        columns = [text_ids(column) for column in features]
        self._check_columns([len(column) for column in columns])
        return {"labels": labels, "texts": torch.stack(columns, dim=1)}

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Any = None, *, texts: Tensor | None = None
    ) -> Tensor:
        """The loss, (), of (B, D) embeddings of the columns.

        `texts` are (B, columns) integers, equal where texts are, across columns (and processes); without them no
        duplicate is known, and none is masked.
        """
        self._check_columns([len(column) for column in embeddings])
        own = embeddings[0]
        if texts is not None and tuple(texts.shape) != (len(own), len(embeddings)):
            raise ValueError(
                f"texts must have shape {(len(own), len(embeddings))}, an id for each row and column of embeddings, "
                f"got {tuple(texts.shape)}"
            )
        texts = None if texts is None else texts.to(own.device)
        sizes, start = process_rows(own, uneven=self.uneven) if self.gather_across_devices else ([len(own)], 0)
        loss = self.of_columns(embeddings, labels, texts, sizes, start)
        return loss * (len(own) * len(sizes) / sum(sizes))

    @abstractmethod
    def of_columns(
        self, embeddings: list[Tensor], labels: Any, texts: Tensor | None, sizes: list[int], start: int
    ) -> Tensor:
        """Mean over the rows of this process, numbers start … of all processes', which have `sizes` rows."""

    def contrast(
        self,
        embeddings: list[Tensor],
        sizes: list[int],
        start: int,
        *,
        texts: Tensor | None = None,
        guide: list[Tensor] | None = None,
        directions: tuple[str, ...],
        **form: Any,
    ) -> Tensor:
        """info_nce_loss of this process's rows and all processes' columns, in any form.

        Args:
            embeddings, texts, sizes, start: see of_columns.
            guide: another encoder's embeddings of the columns, (B, G).
            directions, form: the op's.
        """
        scale = self.differentiable_scale()
        own = embeddings[0]
        targets = torch.arange(start, start + len(own), device=own.device)
        whole = bool(OF_ANCHORS & {*directions}) or len(sizes) == 1
        anchors = gather_rows(own, sizes) if whole and len(sizes) > 1 else None
        # Column by column: blocks of rows of several columns would not stay in order.
        positives, *others = (gather_rows(column, sizes) for column in embeddings[1:])
        negatives = torch.cat(others) if others else None
        known: dict[str, Any] = {}
        of_rows = slice(None) if whole else targets  # of the anchors that the op is given, its rows or all
        if (ids := self.duplicate_ids(texts, sizes)) is not None:
            known["ignore"] = (ids[0][of_rows], ids[1])
        if guide is not None:
            first, *rest = (gather_rows(column, sizes) for column in guide)
            known["guide"] = (first[of_rows], rest[0], *([torch.cat(rest[1:])] if others else []))
        given: dict[str, Any] = {"scale": scale, "targets": targets, "all_anchors": anchors, "directions": directions}
        return info_nce_loss(own, positives, negatives, **given, **known, **form)

    def duplicate_ids(self, texts: Tensor | None, sizes: list[int]) -> tuple[Tensor, Tensor] | None:
        """Ids of all processes' anchors and columns, equal where texts are not negatives of each other; None where no
        text occurs twice, as in most batches: comparing ids is one more pass over the logits. A GPU waits for it."""
        if texts is None or not self.mask_duplicates:
            return None
        of_anchors, of_columns = related_as_ids(gather_rows(texts, sizes))
        twice = max(torch.bincount(of_anchors).max(), torch.bincount(of_columns)[of_anchors].max()) > 1
        return (of_anchors, of_columns) if twice else None

    def _check_columns(self, rows: list[int]) -> None:
        if len(rows) < 2 or len(set(rows)) > 1:
            raise ValueError(
                f"{type(self).__name__} needs columns anchor, positive (the anchors again, as SimCSE does) and any "
                f"number of negatives, with a text in each row, got columns of {', '.join(map(str, rows))} rows"
            )


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
    if not isinstance(tokens, Tensor) or features.get("modality", "text") != "text":
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


def one_of(**words: tuple[Any, tuple[Any, ...]]) -> None:
    """ValueError for a keyword's value that is none of those there are."""
    for name, (value, known) in words.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")
