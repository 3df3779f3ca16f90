"""InfoNCE over in-batch and hard negatives, with the batch's false negatives left out."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from raoe_kernels import info_nce_loss
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.gathering import gather_rows, process_rows
from raoe_train.losses.reads import TRIPLETS


class InfoNCELoss(CachedLoss):
    """Each anchor's positive against the positives and negatives of the whole batch, over ``info_nce_loss``.

    Columns are anchor, positive and any number of hard negatives, as many rows each; labels are ignored. One hard
    negative is BeLLM's Eq. 6; the value is that of sentence-transformers' MultipleNegativesRankingLoss with cos_sim
    where no text occurs twice. Logits come and go by chunks: memory is that of the embeddings.

    Args:
        model, scale, cached: see CachedLoss. With gather_across_devices negatives, and duplicates, are those of all
            processes' batches. Each process computes the rows of its own pairs and returns their part of the loss times
            the number of processes: the mean over processes, of the loss and, in DistributedDataParallel, of the
            gradient, is the whole batch's.
        symmetric: positives are to find their anchors, too. The loss is the mean of both directions
            (directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction" in sentence-transformers).
        mask_duplicates: leave false negatives out of the softmax. A column, positive or negative, is no negative of an
            anchor if its text is the anchor's, or is the positive of that anchor's text in any row of the batch; in
            the other direction, the same pairs. An anchor's own positive always counts. Texts are the same where the
            encoder gets the same tokens (prompts included, after truncation). Columns that are no texts are an error.
    """

    name = "infonce"
    reads = TRIPLETS
    cites: ClassVar[tuple[str, ...]] = ("oord2018representation", "li2024bellm")

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        *,
        symmetric: bool = False,
        mask_duplicates: bool = True,
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        self.symmetric = symmetric
        self.mask_duplicates = mask_duplicates

    def beside(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        if not self.mask_duplicates:
            return {}
        # Mini-batches are slices of the columns, and the encoder's modules may change them.
        columns = [text_ids(column) for column in features]
        _check_columns([len(column) for column in columns])
        return {"texts": torch.stack(columns, dim=1)}

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Any = None, *, texts: Tensor | None = None
    ) -> Tensor:
        """The loss, (), of (B, D) embeddings of the columns.

        `texts` are (B, columns) integers, equal where texts are, across columns (and processes); without them no
        duplicate is known, and none is masked.
        """
        _check_columns([len(column) for column in embeddings])
        own = embeddings[0]
        if texts is not None and tuple(texts.shape) != (len(own), len(embeddings)):
            raise ValueError(
                f"texts must have shape {(len(own), len(embeddings))}, an id for each row and column of embeddings, "
                f"got {tuple(texts.shape)}"
            )
        sizes, start = process_rows(own, uneven=self.uneven) if self.gather_across_devices else ([len(own)], 0)
        # Column by column: blocks of rows of several columns would not stay in order.
        positives, *negatives = (gather_rows(column, sizes) for column in embeddings[1:])
        same = None if texts is None else duplicates(gather_rows(texts.to(own.device), sizes))
        loss = self._one_way(own, positives, negatives, start, same)
        if self.symmetric:
            # Not the kernel's `symmetric`: its rows are the columns of all processes, which each would compute.
            anchors = gather_rows(own, sizes)
            back = self._one_way(embeddings[1], anchors, [], start, None if same is None else same.flipped())
            loss = (loss + back) / 2
        return loss * (len(own) * len(sizes) / sum(sizes))

    def _one_way(
        self, rows: Tensor, partners: Tensor, negatives: list[Tensor], start: int, same: Duplicates | None
    ) -> Tensor:
        """Mean over the rows, which are numbers start … of all processes', of the loss of finding their partners."""
        others = torch.cat(negatives) if negatives else None
        targets = torch.arange(start, start + len(rows), device=rows.device)

        def loss(which: Any, ignore: Any) -> Tensor:
            found = {"targets": targets[which], "ignore": ignore}
            return info_nce_loss(rows[which], partners, others, tau=self.scale, **found)

        if same is None:
            return loss(slice(None), None)
        row_ids, column_ids, fits = same.ids()
        row_ids, fits = row_ids[targets], fits[targets]
        # Both questions make a GPU wait for its queue; a mask for every row would cost a byte a logit instead.
        if fits.all():
            # Most batches have no duplicates, and comparing ids is one more pass over the logits.
            unique = torch.bincount(column_ids)[row_ids].max() == 1
            return loss(slice(None), None if unique else (row_ids, column_ids))
        # The loss is a mean of rows, so only those that ids cannot express need a mask.
        by_ids, by_mask = fits.nonzero()[:, 0], (~fits).nonzero()[:, 0]
        of_ids = loss(by_ids, (row_ids[by_ids], column_ids)) * len(by_ids)
        return (of_ids + loss(by_mask, same.mask(targets[by_mask])) * len(by_mask)) / len(rows)


class Duplicates(NamedTuple):
    """Which texts are no negatives of which: the links (from_text[e], to_text[e]), each of them once.

    rows (R,) and columns (C,) are the texts of what is compared. All texts are numbers below `texts`.
    """

    rows: Tensor
    columns: Tensor
    from_text: Tensor
    to_text: Tensor
    texts: int

    def flipped(self) -> Duplicates:
        """The other direction: partners, the first R columns, look for rows."""
        partners = self.columns[: len(self.rows)]
        return Duplicates(partners, self.rows, self.to_text, self.from_text, self.texts)

    def ids(self) -> tuple[Tensor, Tensor, Tensor]:
        """row ids (R,), column ids (C,), and (R,) bool: where the row's id equals just the ids of columns that it is
        linked with.

        An id is the smallest row text that a column text is linked with. Ids can say it unless links form a chain:
        with pairs (A, B) and (B, C), B is linked with columns B and C, and A with B alone.
        """
        alone = self.from_text.new_full((self.texts,), self.texts)
        of_column = alone.scatter_reduce(0, self.to_text, self.from_text, "amin")
        of_row = alone.scatter_reduce(0, self.from_text, of_column[self.to_text], "amin")
        agree = of_row[self.from_text] == of_column[self.to_text]
        links = torch.bincount(self.from_text, minlength=self.texts)
        right = torch.bincount(self.from_text[agree], minlength=self.texts)
        equal = torch.bincount(of_column, minlength=self.texts + 1)[of_row]
        fits = (links == right) & (links == equal)
        return of_row[self.rows], of_column[self.columns], fits[self.rows]

    def mask(self, which: Tensor) -> Tensor:
        """(n, C) bool: the columns that rows[which] are linked with."""
        known, place = torch.unique(self.rows[which], return_inverse=True)
        wanted = torch.isin(self.from_text, known)
        linked = torch.zeros(len(known), self.texts, dtype=torch.bool, device=known.device)
        linked[torch.searchsorted(known, self.from_text[wanted]), self.to_text[wanted]] = True
        return linked[place[:, None], self.columns]


def duplicates(texts: Tensor) -> Duplicates:
    """From (N, columns) ids of the whole batch's texts: each anchor is linked with itself and with its positives."""
    number = torch.unique(texts, return_inverse=True)[1]
    count = texts.numel()
    anchors, columns = number[:, 0], number[:, 1:].T.reshape(-1)
    # Only texts that are columns: a link to any other would be one that no id can say.
    themselves = anchors[torch.isin(anchors, columns)]
    links = torch.unique(torch.cat([anchors * count + number[:, 1], themselves * (count + 1)]))
    return Duplicates(anchors, columns, links // count, links % count, count)


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


def _check_columns(rows: list[int]) -> None:
    if len(rows) < 2 or len(set(rows)) > 1:
        raise ValueError(
            "InfoNCELoss needs columns anchor, positive (the anchors again, as SimCSE does) and any number of "
            f"negatives, with a text in each row, got columns of {', '.join(map(str, rows))} rows"
        )
