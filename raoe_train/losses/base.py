"""What all loss modules share: a scale, and gradient caching."""

from __future__ import annotations

import math
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from torch import Tensor, nn

from raoe_train.losses.gathering import Gather


class CachedLoss(CachedLossMixin, nn.Module):
    """A loss module of sentence-transformers that encodes in mini-batches where `mini_batch_size` says so.

    A subclass implements ``_of_whole_batch(embeddings, labels)``, the loss, (), of a batch whose (B, D) columns are
    whole again, and a ``forward`` that calls ``forward_cached`` where ``uses_gradient_cache`` is set.

    ValueError: a scale not above 0, a mini_batch_size below 1, or a gather_across_devices not True, False or "uneven".
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        *,
        mini_batch_size: int | None = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__()
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a number above 0 (20 is a temperature of 0.05), got {scale!r}")
        if mini_batch_size is not None and mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1 or None, got {mini_batch_size!r}")
        if gather_across_devices not in (True, False, "uneven"):
            raise ValueError(
                f'gather_across_devices must be True, False or "uneven" (sizes differ), got {gather_across_devices!r}'
            )
        self.model = model
        self.scale = scale
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = mini_batch_size is not None

    @property
    def uneven(self) -> bool:
        """Whether processes tell each other how many rows they have."""
        return self.gather_across_devices == "uneven"

    def _of_whole_batch(self, embeddings: list[Tensor], labels: Any) -> Tensor:
        raise NotImplementedError

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """CachedLossMixin's hook: the loss of a batch whose embeddings come in mini-batches."""
        loss = self._of_whole_batch([torch.cat(column) for column in reps], labels)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
        }

    @property
    def temperature(self) -> float:
        """1 / scale, as the literature on InfoNCE has it."""
        return 1.0 / self.scale
