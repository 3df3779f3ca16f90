"""Pairs of earlier steps, which those of a batch are compared with: three numbers a pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PairMemory(nn.Module):
    """The last `size` pairs of earlier steps, 12 bytes each: similarity and score in float32, label in int32.

    The similarities are of the encoder as it was at their step; nothing brings them up to date. Buffers keep their
    shape however many pairs there are, and how many that is is known on the host, so that no GPU is asked; it stays the
    same once the memory is full (or `age` steps of equal batches are over), as CUDA graphs want it.

    Args:
        size: M, from 1.
        age: steps after which a pair is dropped, from 1; None keeps it until it is pushed out.
    """

    similarity: Tensor
    score: Tensor
    label: Tensor

    def __init__(self, size: int, age: int | None = None) -> None:
        super().__init__()
        self.size, self.age = size, age
        self.register_buffer("similarity", torch.zeros(size))
        self.register_buffer("score", torch.zeros(size))
        self.register_buffer("label", torch.zeros(size, dtype=torch.int32))
        self._came: list[int] = []  # how many pairs each step brought, the last step's last

    @property
    def held(self) -> int:
        """How many pairs there are."""
        return min(self.size, sum(self._came))

    def forward(self, similarity: Tensor, score: Tensor, label: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(similarity, score, label) of a batch's pairs, (B,) each, and after them of those of earlier steps, (B + m,);
        label None where it is. The batch is remembered from now on, in the place of the oldest.

        Scores are float32 from here on, so that equal ones stay equal.
        """
        if self.score.device != similarity.device:
            self.to(similarity.device)
        earlier, score = slice(self.size - self.held, None), score.float()
        found = (
            torch.cat([similarity, self.similarity[earlier]]),
            torch.cat([score, self.score[earlier]]),
            None if label is None else torch.cat([label, self.label[earlier]]),
        )
        for kept, new in ((self.similarity, similarity), (self.score, score), (self.label, label)):
            if new is not None:
                kept.copy_(torch.cat([kept, new.detach().to(kept.dtype)])[-self.size :])
        self._came.append(len(score))
        while len(self._came) > (self.age or self.size) or sum(self._came[1:]) >= self.size:
            del self._came[0]
        return found

    def get_extra_state(self) -> Any:
        return list(self._came)

    def set_extra_state(self, state: Any) -> None:
        self._came = list(state)
