"""ListMLE over lists of sentences: what post-training on ranking sentences minimises."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import list_mle_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.gathering import gather_rows
from raoe_train.losses.reads import LISTS

Ties = Literal["ordinal", "random"]


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
    compares_batch = False
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
