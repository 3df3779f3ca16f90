"""ListMLE on lists of ranking sentences."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from raoe_kernels import list_mle_loss
from raoe_train.config import PositiveFloat
from raoe_train.losses.base import CachedLoss, gather_rows
from raoe_train.losses.collators import LISTS

TieOrder = Literal["ordinal", "random"]


class ListMLELoss(CachedLoss):
    """Train each sentence in a list to rank the list's sentences in the teacher's order, with ``list_mle_loss``.

    A list of n sentences gives n rows of cosines. Row j contains the model's cosines between sentence x_j and *every*
    sentence in the list, including x_j itself, as in the ranking-sentences paper (Eq. 8 and 9) and its code. The target
    for row j is row j of the symmetric matrix refine_similarity(teacher's cosines, omega). Without a teacher ("ranking
    only"), the target for x_k in row j is -|k - j|, so sentences nearer to x_j in the list rank higher (Eq. 5).

    The loss is the mean over all rows in the batch. Each list is therefore weighted by its number of sentences, as in
    the paper, which sums over the rows of a list. Lists are not compared with each other.

    A batch is one column that contains the sentences of all lists in order. The labels come from ListCollator:
    {"lengths": number of sentences in each list (B,), "teacher": (B, n, n), where n is the longest length and padding
    is ignored}.

    Args:
        model, scale, **cached: see CachedLoss; a scale of 20 corresponds to the paper's temperature of 0.05. With
            gather_across_devices, a process's loss is weighted by its number of sentences, so the mean over processes
            is the whole batch's loss, and DistributedDataParallel's gradient is the whole batch's gradient. Texts are
            not gathered.
        ties: how to order sentences with equal teacher values; ordinal keeps the order of the list, random shuffles
            these sentences at every call, as the paper's code does. Without a teacher, both neighbours of x_j always
            tie
    """

    reads = LISTS
    cites = ("xia2008listwise", "he2025refining")

    def __init__(
        self, model: SentenceTransformer, scale: PositiveFloat = 20.0, *, ties: TieOrder = "ordinal", **cached: Any
    ) -> None:
        super().__init__(model, scale, **cached)
        self.ties = ties

    def prepare_labels(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        if isinstance(labels, Mapping) and "lengths" in labels:
            # read the maximum now: the planned batch is still on the CPU, so this does not wait for a GPU
            labels = {**labels, "longest": int(labels["lengths"].max())}
        return {"labels": labels}

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Tensor:
        """Return the scalar loss from one column of (N, D) embeddings. Raise ValueError for several columns, or if the
        labels lack "lengths"."""
        if len(embeddings) != 1 or not isinstance(labels, Mapping) or "lengths" not in labels:
            got = f"{len(embeddings)} columns and {type(labels).__name__} labels"
            raise ValueError(f"ListMLELoss needs one column and the labels from raoe_train.ListCollator; got {got}")
        (column,) = embeddings
        lengths = labels["lengths"].to(column.device)
        teacher = labels.get("teacher")
        if teacher is None:
            place = torch.arange(labels.get("longest") or int(lengths.max()), device=column.device)
            teacher = -(place - place[:, None]).abs().expand(len(lengths), -1, -1)
        teacher = teacher.detach().to(column.device)
        longest = teacher.shape[1]
        place = torch.arange(longest, device=column.device)
        real = place < lengths[:, None]
        starts = (lengths.cumsum(0) - lengths)[:, None]
        # Normalize rows, at least in float32. A list's padding holds sentences of the next list, which the mask hides.
        wide = column if column.dtype == torch.float64 else column.float()
        lists = nn.functional.normalize(wide, dim=1)[(starts + place).clamp(max=len(column) - 1)]
        with torch.autocast(column.device.type, enabled=False):  # bfloat16 is too coarse for a ranking
            student = lists @ lists.transpose(1, 2)
        mask = real[:, :, None] & real[:, None, :]
        rows = len(mask) * longest
        # Padding rows have loss 0 but count in the mean, so the mean is rescaled to the N real rows below.
        student, teacher, mask = (each.reshape(rows, longest) for each in (student, teacher, mask))
        loss = list_mle_loss(student, teacher, scale=self.scale, mask=mask, ties=self.ties)
        size = torch.tensor([len(column)], device=column.device)
        sizes = gather_rows(size).tolist() if self.gather_across_devices else [len(column)]
        return loss * (rows * len(sizes) / sum(sizes))
