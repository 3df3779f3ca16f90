"""Losses with a teacher that encodes each batch, for the costs in Table 4 of the RAOE paper. In recipes, name them by
their import paths, such as benchmarks.studies.distillation.RankDistillationLoss."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.studies.jobs import PAIRS_WITH_TEXTS, CachedLoss, teacher_embeddings
from raoe_kernels import list_mle_loss, pairwise_cosine


class DistillationLoss(CachedLoss):
    """Base class of losses with a frozen teacher, which encodes the texts of a batch with its own tokenizer and prompt.
    The labels are {"texts": two lists of B strings, one list per column}, from raoe_train.TextCollator.

    Args:
        model, scale, **cached: arguments of CachedLoss, except gather_across_devices, which raises ValueError.
        embed: the teacher, a SentenceTransformer or a function from n sentences to embeddings, [n, D'] float32, of any
            dimension D'. The teacher is not a submodule of the loss, so it is not trained, moved to a device or saved.
            In recipes, the section `teacher` sets it (raoe_train.encoders.embed.embedder).
    """

    reads = PAIRS_WITH_TEXTS
    asks_teacher = True
    cites = ("liu2023rankcse",)

    def __init__(self, model: Any, embed: Any, scale: float = 20.0, **cached: Any) -> None:
        super().__init__(model, scale, **cached)
        if self.gather_across_devices:
            raise ValueError(f"{type(self).__name__} does not support gather_across_devices: leave it false")
        self._embed = getattr(embed, "encode", embed)  # as a module, it would be trained and saved with the loss

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Tensor:
        """Return the scalar loss of two columns of (B, D) embeddings."""
        if len(embeddings) != 2:
            raise ValueError(f"{type(self).__name__} compares 2 columns of sentences, got {len(embeddings)}")
        teacher = teacher_embeddings(self._embed, labels, embeddings)
        # bfloat16 has only about three digits, too few for rankings and targets
        with torch.autocast(embeddings[0].device.type, enabled=False):
            a, b = (column if column.dtype == torch.float64 else column.float() for column in embeddings)
            return self.of_pairs(a, b, *(column.to(a.dtype) for column in teacher))

    @abstractmethod
    def of_pairs(self, a: Tensor, b: Tensor, teacher_a: Tensor, teacher_b: Tensor) -> Tensor:
        """Return the scalar loss of (B, D) embeddings and the teacher's (B, D') embeddings."""


class SimilarityDistillationLoss(DistillationLoss):
    """Mean squared difference between the model's cosine and the teacher's cosine of each pair.

    Table 4 of the RAOE paper calls this loss MSE. For the paper's MSE2, whose targets are scores stored in the data,
    use CosineSimilarityLoss. `scale` has no effect.
    """

    def of_pairs(self, a: Tensor, b: Tensor, teacher_a: Tensor, teacher_b: Tensor) -> Tensor:
        return nn.functional.mse_loss(pairwise_cosine(a, b), pairwise_cosine(teacher_a, teacher_b))


class RankDistillationLoss(DistillationLoss):
    """Train each first sentence to rank all second sentences of the batch in the teacher's order (ListMLE).

    Applies ``list_mle_loss`` to the model's B x B cosines times `scale`; the teacher's cosines set the target order.
    This is the rank distillation of RankCSE (Liu et al. 2023, section 3.3), for two columns instead of two dropout
    views. RankCSE excludes the diagonal (a sentence with itself). This loss includes it (the two sentences of a row).
    """

    def of_pairs(self, a: Tensor, b: Tensor, teacher_a: Tensor, teacher_b: Tensor) -> Tensor:
        a, b, teacher_a, teacher_b = (nn.functional.normalize(each, dim=1) for each in (a, b, teacher_a, teacher_b))
        return list_mle_loss(a @ b.T, teacher_a @ teacher_b.T, scale=self.scale)
