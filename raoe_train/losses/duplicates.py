"""Which texts of a batch are no negatives of each other: the same tokens, or linked by pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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

    def linked(self, rows: Tensor, columns: Tensor) -> Tensor:
        """bool: whether rows[...] (numbers of texts) are linked with columns[...]."""
        return torch.isin(rows * self.texts + columns, self.from_text * self.texts + self.to_text)

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


def related_as_ids(texts: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of anchors (N,) and of columns (C,), from (N, columns) ids of the whole batch's texts: equal where a chain of
    pairs of an anchor and its positive links two texts (connected components).

    Ids cannot say that A and C, of pairs (A, B) and (C, B), are linked with B and not with each other; here they are.
    """
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
