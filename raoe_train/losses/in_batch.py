"""Base class for losses with in-batch negatives, and the text ids that it uses to find duplicate texts."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.distributed import get_rank, get_world_size
from torch import Tensor

from raoe_kernels import info_nce_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.base import CachedLoss, gather_rows
from raoe_train.losses.collators import ROWS

NO_CANDIDATE = -(2**31)  # id of a text that is not a negative for any anchor, see `ignore` of info_nce_loss
MISSING = torch.iinfo(torch.int64).min  # text id of a missing negative
ANCHOR_DIRECTIONS = {"query_to_query", "doc_to_query"}  # directions whose candidates are anchors
Ids = tuple[Tensor, Tensor] | None
"""(ids of anchors, ids of other texts) in all processes, or None if all ids differ. Texts with the same id are not used
as negatives for each other (see `ignore` of info_nce_loss). Texts have one id or several (see duplicate_ids)."""


class InBatchLoss(CachedLoss):
    """Base class for losses that train each anchor to be more similar to its positive than to other texts in the batch.

    The columns are anchor, positive and any number of hard negatives, all with the same number of rows. Rows can lack
    negatives (see RowCollator). Logits are computed in chunks and not stored, so memory is linear in the batch size.

    Args:
        model, scale, **cached: see CachedLoss. With gather_across_devices, texts from all processes are negatives, and
            duplicates are masked across processes. Each process returns the mean over its own pairs, so the mean over
            processes is the whole batch's loss, and DistributedDataParallel's gradient is the whole batch's gradient.
        mask_duplicates: exclude false negatives: texts that equal the anchor, or that equal any of the anchor's
            positives in any row. (Directions between anchors exclude anchors with the same positives.) The row's own
            positive is never excluded. Texts are equal if their tokens (with prompts, after truncation) are equal.
            Columns that do not contain text raise an error
    """

    reads, allows_missing = ROWS, True  # negatives of a row may be missing

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        *,
        mask_duplicates: bool = True,
        **cached: Any,
    ) -> None:
        super().__init__(model, scale, **cached)
        self.mask_duplicates = mask_duplicates

    def prepare_labels(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        missing: Any = labels.get("missing") if isinstance(labels, Mapping) else None
        if missing is None and not self.mask_duplicates:
            return {"labels": labels}
        if self.gather_across_devices and not self.mask_duplicates:
            raise ValueError("if rows lack negatives, gather_across_devices needs mask_duplicates=True")
        # compute ids now: later, columns are sliced into mini-batches, and the encoder's modules may change features
        if self.mask_duplicates:
            columns = [text_ids(column) for column in features]
            self._check(columns)
            texts = torch.stack(columns, dim=1)
        else:
            texts = torch.arange(missing.numel(), device=missing.device).view_as(missing)
        if missing is not None:
            texts = texts.masked_fill(missing.to(texts.device), MISSING)
        if self.gather_across_devices:
            return {"labels": labels, "texts": texts}
        return {"labels": labels, "ids": duplicate_ids(texts)}

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Any = None, *, texts: Tensor | None = None, ids: Ids = None
    ) -> Tensor:
        """Return the scalar loss from the (B, D) embeddings of each column.

        `texts` contains int64 text ids (B, columns). Equal texts have equal ids in all columns and processes, and a
        missing negative has the id MISSING. `ids` (see Ids) can be passed instead of `texts`. Without `texts` and
        `ids`, duplicates are not masked.
        """
        self._check(embeddings)
        return self.of_columns(embeddings, labels, ids if texts is None else duplicate_ids(self.gather(texts)))

    def _check(self, columns: Sequence[Tensor]) -> None:
        if len(columns) < 2 or len({*map(len, columns)}) > 1:
            rule = "needs two or more columns of equal length: anchor, positive (SimCSE: the anchor again), negatives"
            rows = ", ".join(str(len(column)) for column in columns)
            raise ValueError(f"{type(self).__name__} {rule}; got columns of {rows} rows")

    @abstractmethod
    def of_columns(self, embeddings: list[Tensor], labels: Any, ids: Ids) -> Tensor:
        """Return the mean loss over the rows of this process."""

    def gather(self, column: Tensor) -> Tensor:
        """Return a column with the rows from all processes. Without gather_across_devices, return the column unchanged.
        Gather each column separately, because gathering concatenated columns would mix their rows."""
        return gather_rows(column) if self.gather_across_devices else column

    def targets(self, own: Tensor) -> Tensor | None:
        """Return the indices (B,) of this process's rows in a gathered column, or None if nothing is gathered."""
        if not self.gather_across_devices or get_world_size() == 1:
            return None
        return torch.arange(len(own), device=own.device) + get_rank() * len(own)

    def contrast(
        self,
        embeddings: list[Tensor],
        ids: Ids,
        guide: list[Tensor] | None = None,
        directions: tuple[str, ...] = ("query_to_doc",),
        **form: Any,
    ) -> Tensor:
        """Compute info_nce_loss for this process's anchors, with the columns from all processes. `guide` is a list with
        the guide's embeddings (B, G) of each column. `form` contains other keyword arguments of info_nce_loss."""
        own, targets = embeddings[0], self.targets(embeddings[0])
        positives, *columns = map(self.gather, embeddings[1:])
        is_alone = len(positives) == 1 and torch.is_grad_enabled()
        if is_alone and (not columns or (ids is not None and (ids[1][1:] == NO_CANDIDATE).all())):
            warnings.warn("a batch of one row has no negatives, so nothing is learned from it", stacklevel=2)
        anchors, rows = None, slice(None) if targets is None else targets  # rows of `anchors` to contrast
        if len(positives) > len(own) and ANCHOR_DIRECTIONS & {*directions}:
            anchors, rows = self.gather(own), slice(None)
        if ids is not None:
            form["ignore"] = (ids[0][rows], ids[1])
        if guide is not None:
            first, second, *rest = map(self.gather, guide)
            form["guide"] = (first[rows], second, *([torch.cat(rest)] if columns else []))
        negatives = torch.cat(columns) if columns else None
        form.update(targets=targets, all_anchors=anchors, directions=directions)
        return info_nce_loss(own, positives, negatives, **form)


def duplicate_ids(texts: Tensor) -> Ids:
    """Convert text ids (N, columns) to Ids, which tell the loss function which texts to exclude from an anchor's
    negatives. If no text occurs twice and none is missing, as in most batches, return None. In this case, the loss
    function does not compare ids. On a GPU, this function synchronizes with the device.

    A query's negatives exclude the query itself and all of its positives, in any row. Queries with the same positives
    share an id. Queries that share only some positives must not share an id. For example, with the pairs (q1, A), (q1,
    B), (q2, B) and (q2, C), a shared id would also exclude C from the negatives of q1. In such batches, each text has a
    list of ids: B has the id of q1 at one index of its list, and the id of q2 at another.
    """
    number = torch.unique(texts, return_inverse=True)[1]
    anchors, columns, count = number[:, 0], number[:, 1:].T.flatten(), int(number.max()) + 1
    missing = texts[:, 1:].T.flatten() == MISSING
    own = anchors[torch.isin(anchors, columns)]  # queries that also occur in other columns
    pairs = torch.cat([anchors * count + number[:, 1], own * count + own]).unique()
    queries, left_out = pairs // count, pairs % count
    repeats = torch.bincount(columns, minlength=count)[left_out].max() > 1
    if len(pairs) == len(anchors.unique()) == len(anchors) and not (repeats or missing.any()):
        return None
    texts_of: dict[int, list[int]] = {}
    for query, text in zip(queries.tolist(), left_out.tolist(), strict=True):
        texts_of.setdefault(query, []).append(text)
    places = list[dict[int, int]]()  # one {text: id} per place
    of_query, chosen = dict[int, tuple[int, int]](), dict[tuple[int, ...], tuple[int, int]]()
    for query, each in texts_of.items():
        if (key := tuple(each)) not in chosen:
            place = next((k for k, names in enumerate(places) if names.keys().isdisjoint(each)), len(places))
            if place == len(places):
                places.append({})
            places[place].update(dict.fromkeys(each, query))
            chosen[key] = place, query
        of_query[query] = chosen[key]
    # by default, each id differs from all other ids
    ids = (-1 - torch.arange(len(anchors) + len(columns), device=texts.device))[:, None].repeat(1, len(places))
    rows = [of_query[query] for query in anchors.tolist()]
    for place, names in enumerate(places):
        id_of = torch.full((count,), -1, device=texts.device)
        id_of[list(names)] = torch.tensor([*names.values()], device=texts.device)
        known = torch.tensor([name if at == place else -1 for at, name in rows], device=texts.device)
        known = torch.cat([known, id_of[columns]])
        ids[:, place] = torch.where(known < 0, ids[:, place], known)
    ids[len(anchors) :][missing] = NO_CANDIDATE
    anchor_ids, column_ids = (ids[:, 0] if len(places) == 1 else ids).int().split([len(anchors), len(columns)])
    return anchor_ids, column_ids


def text_ids(features: dict[str, Tensor]) -> Tensor:
    """Return the int64 ids (B,) of a column's texts. Texts with equal tokens get equal ids, in any column and process,
    and with padding on either side.

    Each token and its position are hashed to 64 bits with splitmix64's finalizer, and a text's id is the sum of its
    hashes. The ids are computed on the tokens' device. Two distinct texts have the same id with a probability of 2^-64.
    """
    tokens = features.get("input_ids")
    texts = features.get("modality", "text") in ("text", "message") and "pixel_values" not in features
    if not isinstance(tokens, Tensor) or not texts:
        raise ValueError("mask_duplicates needs text, but a column contains other inputs: set mask_duplicates=False")
    if "cu_seq_lens_q" in features or "offsets" in features:  # all texts are in one row: packed, or StaticEmbedding
        starts = features["cu_seq_lens_q"][:-1] if "cu_seq_lens_q" in features else features["offsets"]
        tokens, starts = tokens.reshape(-1), starts.long()
        place = torch.arange(len(tokens), device=tokens.device)
        row = torch.searchsorted(starts, place, right=True) - 1
        return tokens.new_zeros(len(starts), dtype=torch.long).index_add(0, row, _hash(tokens, place - starts[row]))
    real = features.get("attention_mask", torch.ones_like(tokens)).bool()
    return _hash(tokens, real.cumsum(1) - 1).masked_fill(~real, 0).sum(1)


def _hash(tokens: Tensor, positions: Tensor) -> Tensor:
    x = (tokens.long() << 32) + positions + 1
    # int64 products wrap around, and >> copies the sign bit, which the masks clear
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))
