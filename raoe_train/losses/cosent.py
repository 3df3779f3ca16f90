"""CoSENT and AnglE, drop-in for sentence-transformers' losses of these names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, util
from torch import Tensor

from raoe_kernels import cosent_loss, pairwise_cosine
from raoe_train.losses.gathering import Gather
from raoe_train.losses.pairs import PairLoss


class CoSENTLoss(PairLoss):
    """sentence-transformers' CoSENTLoss, same arguments and values, with gradient caching and gathering.

    Args:
        model: the encoder.
        scale: similarities are multiplied by it.
        similarity_fct: (B, D), (B, D) -> (B,).
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: rank over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = util.pairwise_cos_sim,
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__(model, scale, mini_batch_size=mini_batch_size, gather_across_devices=gather_across_devices)
        self.similarity_fct = similarity_fct

    def _similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return pairwise_cosine(a, b) if self.similarity_fct is util.pairwise_cos_sim else self.similarity_fct(a, b)

    def _loss(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> Tensor:
        return cosent_loss(similarity, score, tau=self.scale)

    def get_config_dict(self) -> dict[str, Any]:
        name = getattr(self.similarity_fct, "__name__", repr(self.similarity_fct))
        return {**super().get_config_dict(), "similarity_fct": name}

    @property
    def citation(self) -> str:
        return _COSENT_CITATION


class AnglELoss(CoSENTLoss):
    """sentence-transformers' AnglELoss: CoSENT over ``pairwise_angle_sim``, same arguments and values.

    More than two columns are an anchor, its positive and negatives: the positive's score is the label (1
    without one), each negative's is 1 minus that.

    Args:
        model: the encoder.
        scale: similarities are multiplied by it.
        mini_batch_size: encode so many pairs at a time, with the gradient of the whole batch.
        gather_across_devices: rank over the batches of all processes.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__(
            model,
            scale,
            util.pairwise_angle_sim,
            mini_batch_size=mini_batch_size,
            gather_across_devices=gather_across_devices,
        )

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any) -> Tensor | dict[str, Tensor]:
        if len(embeddings) > 2:
            anchor, *others = embeddings
            positive = anchor.new_ones(len(anchor)) if labels is None else self._targets(labels, len(anchor))[0]
            labels = torch.cat([positive, *[1 - positive] * (len(others) - 1)])
            embeddings = [anchor.repeat(len(others), 1), torch.cat(others)]
        return super().compute_loss_from_embeddings(embeddings, labels)

    @property
    def citation(self) -> str:
        return ANGLE_CITATION


_COSENT_CITATION = """
@article{huang2024cosent,
    title = {{CoSENT}: Consistent Sentence Embedding via Similarity Ranking},
    author = {Huang, Xiang and Peng, Hao and Zou, Dongcheng and Liu, Zhiwei and Li, Jianxin and Liu, Kay and
        Wu, Jia and Su, Jianlin and Yu, Philip S.},
    journal = {IEEE/ACM Transactions on Audio, Speech, and Language Processing},
    year = {2024},
    doi = {10.1109/TASLP.2024.3402087}
}
"""
ANGLE_CITATION = """
@inproceedings{li2024angle,
    title = {{AoE}: Angle-optimized Embeddings for Semantic Textual Similarity},
    author = {Li, Xianming and Li, Jing},
    booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics},
    year = {2024},
    doi = {10.18653/v1/2024.acl-long.101}
}
"""
