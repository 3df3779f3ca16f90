"""Distillation from a teacher: its similarities, or how it ranks the texts of a batch or of given lists."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import list_mle_loss, pairwise_cosine
from raoe_train.config import PositiveFloat
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.gathering import gather_rows
from raoe_train.losses.reads import LISTS, PAIRS_WITH_TEXTS

Embed = Callable[[Sequence[str]], np.ndarray]
Ties = Literal["ordinal", "random"]


def teacher_embeddings(embed: Embed, labels: Any, columns: list[Tensor]) -> list[Tensor]:
    """A teacher's embeddings of the columns' texts, (B, D') each; ValueError for labels without texts."""
    texts = labels.get("texts") if isinstance(labels, Mapping) else None
    if texts is None:
        raise ValueError("a teacher needs the batch's texts: use raoe_train.TextCollator")
    # One call: the teacher encodes each distinct sentence once, sorted by length.
    made = torch.from_numpy(embed([text for column in texts for text in column]))
    return [*made.to(columns[0].device).split([len(column) for column in columns])]


class DistillationLoss(CachedLoss):
    """A loss whose frozen teacher reads each batch's texts, with a tokenizer and a prompt of its own: labels are
    {"texts": the texts of two columns, B strings each} from raoe_train.TextCollator.

    Args:
        model, scale, cached: see CachedLoss; gather_across_devices is a ValueError.
        embed: n sentences -> the teacher's embeddings, [n, D'] float32, of any dimension D'. It is no part of this
            module, so nothing trains, moves or saves it. raoe_train.encoders.embed.embedder makes one, recipes by
            their section `teacher`.
    """

    reads = PAIRS_WITH_TEXTS
    asks_teacher = True
    cites = ("liu2023rankcse",)

    def __init__(self, model: SentenceTransformer, embed: Embed, scale: PositiveFloat = 20.0, **cached: Any) -> None:
        super().__init__(model, scale, **cached)
        if self.gather_across_devices:
            raise ValueError(
                f"{type(self).__name__} compares within the batch of each process: leave gather_across_devices false"
            )
        self._embed = embed

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Tensor:
        """The loss, (), of two columns of (B, D) embeddings."""
        if len(embeddings) != 2:
            raise ValueError(f"{type(self).__name__} compares 2 columns of sentences, got {len(embeddings)}")
        teacher = teacher_embeddings(self._embed, labels, embeddings)
        # bfloat16's three digits are no order, and a coarse target.
        with torch.autocast(embeddings[0].device.type, enabled=False):
            a, b = (column if column.dtype == torch.float64 else column.float() for column in embeddings)
            return self.of_pairs(a, b, *(column.to(a.dtype) for column in teacher))

    @abstractmethod
    def of_pairs(self, a: Tensor, b: Tensor, teacher_a: Tensor, teacher_b: Tensor) -> Tensor:
        """The loss, (), of (B, D) embeddings and the teacher's, (B, D')."""


class SimilarityDistillationLoss(DistillationLoss):
    """Mean over the pairs of (cos(a_i, b_i) - the teacher's cos(a_i, b_i))².

    MSE of the RAOE paper's Table 4; with the teacher's cosines as static scores it is loss mse, the table's MSE2.
    `scale` has no part in it.
    """

    def of_pairs(self, a: Tensor, b: Tensor, teacher_a: Tensor, teacher_b: Tensor) -> Tensor:
        return nn.functional.mse_loss(pairwise_cosine(a, b), pairwise_cosine(teacher_a, teacher_b))


class RankDistillationLoss(DistillationLoss):
    """Each first sentence ranks all second sentences of the batch, and is to rank them as the teacher does: ListMLE.

    The student's B x B cosines times `scale` against the order of the teacher's, over ``list_mle_loss``: the rank
    distillation of RankCSE (Liu et al. 2023, section 3.3) alone, of two columns in place of its two dropout views.
    RankCSE leaves out the diagonal, a sentence with itself; here it is a pair like the others.
    """

    def of_pairs(self, a: Tensor, b: Tensor, teacher_a: Tensor, teacher_b: Tensor) -> Tensor:
        a, b, teacher_a, teacher_b = (nn.functional.normalize(each, dim=1) for each in (a, b, teacher_a, teacher_b))
        return list_mle_loss(a @ b.T, teacher_a @ teacher_b.T, scale=self.scale)


class ListMLELoss(CachedLoss):
    """Each sentence of a list ranks the whole list, and is to rank it as the teacher does, over ``list_mle_loss``.

    Sentence j's row is the cosines of x_j with *every* sentence of its list, x_j itself included (Eq. 8 and 9 of the
    ranking-sentences paper: s_j = [s_j,1 … s_j,n]; its code does the same). The teacher's row j has the same places: of
    refine_similarity(phi, omega) both triangles are read, which mirror each other. Without a teacher the order of the
    list is one, "ranking only": -|k - j|, nearer places before farther ones (Eq. 5).

    The value is the mean over all rows of the batch, so lists count by their sentences, as the paper's sum over a
    list's rows has it; for lists of one length it is the mean of the lists. No list is compared with another.

    A batch is one column, all sentences of all lists one after another, with labels {"lengths": (B,) sentences of each
    list, "teacher": (B, n, n) with n the longest list, what is beyond a list's own corner unread}, of ListCollator.

    Args:
        model, scale, cached: see CachedLoss; a scale of 20 is the paper's temperature of 0.05. With
            gather_across_devices processes weigh by their sentences, so that the mean over processes, of the loss and,
            in DistributedDataParallel, of the gradient, is the whole batch's. Nothing else is gathered.
        ties: what the teacher's equals do, "ordinal" or "random". "ordinal" keeps the order of the list, "random"
            shuffles them anew at every call, as the paper's code does. Without a teacher x_j-1 and x_j+1 are equals.
    """

    reads = LISTS
    cites = ("xia2008listwise", "he2025refining")

    def __init__(
        self, model: SentenceTransformer, scale: PositiveFloat = 20.0, *, ties: Ties = "ordinal", **cached: Any
    ) -> None:
        super().__init__(model, scale, **cached)
        self.ties = ties

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Tensor:
        """The loss, (), of one column of (N, D) embeddings; ValueError for labels that are missing."""
        if len(embeddings) != 1 or not isinstance(labels, Mapping) or "lengths" not in labels:
            raise ValueError(
                "ListMLELoss takes one column, the sentences of all lists, and labels with their 'lengths', got "
                f"{len(embeddings)} and {type(labels).__name__}: use raoe_train.ListCollator"
            )
        (own,) = embeddings
        lengths = labels["lengths"].to(own.device)
        teacher = labels.get("teacher")
        if teacher is None:
            place = torch.arange(int(lengths.max()), device=own.device)
            teacher = -(place - place[:, None]).abs().expand(len(lengths), -1, -1)
        teacher = teacher.detach().to(own.device)
        longest = teacher.shape[1]
        place = torch.arange(longest, device=own.device)
        real = place < lengths[:, None]
        starts = (lengths.cumsum(0) - lengths)[:, None]
        # Unit rows, in float32 at least. Beyond a list stands another one's sentence, which the mask hides.
        wide = own if own.dtype == torch.float64 else own.float()
        lists = nn.functional.normalize(wide, dim=1)[(starts + place).clamp(max=len(own) - 1)]
        with torch.autocast(own.device.type, enabled=False):  # bfloat16's three digits are no order
            student = lists @ lists.transpose(1, 2)
        mask = real[:, :, None] & real[:, None, :]
        rows = len(mask) * longest
        # A row without a sentence costs nothing but counts in the mean, which is to be over the N that have one.
        student, teacher, mask = (each.reshape(rows, longest) for each in (student, teacher, mask))
        loss = list_mle_loss(student, teacher, scale=self.scale, mask=mask, ties=self.ties)
        size = torch.tensor([len(own)], device=own.device)
        sizes = gather_rows(size).tolist() if self.gather_across_devices else [len(own)]
        return loss * (rows * len(sizes) / sum(sizes))
