"""What a decoder has read of a context, kept so that it need not read it again.

A chain asks with the context that was the nearer one a step before as the farther one, and all its contexts begin with
the same instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True, eq=False)
class Context:
    """A context that was read, of use to the decoder it comes from and to no other: nothing says which that is."""

    ids: tuple[int, ...]  # of its L tokens
    layers: tuple[tuple[Tensor, Tensor], ...]  # (keys, values), both [key-value heads, L, dim], without padding
    logits: Tensor  # [V] at its end

    def covers(self, ids: Sequence[int]) -> int:
        """How many of `ids`, from the first, need not be read again: all if they are this context, else those that it
        begins with, too, but for the last of `ids`, behind which the logits are not known."""
        if tuple(ids) == self.ids:
            return len(ids)
        pairs = enumerate(zip(ids, self.ids, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), min(len(ids), len(self.ids)))
        return min(same, len(ids) - 1)


def stacked(beginnings: Sequence[tuple[Context, int]]) -> DynamicCache:
    """A left-padded cache of the first `count` tokens of each (context, count)."""
    width = max(count for _, count in beginnings)

    def rows(layer: int, which: int) -> Tensor:
        states = ((context.layers[layer][which], count) for context, count in beginnings)
        return torch.stack([torch.nn.functional.pad(s[:, :count], (0, 0, width - count, 0)) for s, count in states])

    return DynamicCache([(rows(layer, 0), rows(layer, 1)) for layer in range(len(beginnings[0][0].layers))])


def merged(first: Any, second: Any, width: int) -> DynamicCache:
    """Two caches below each other, as wide as `width`: padding goes, or comes, on the left."""

    def fit(states: Tensor) -> Tensor:
        states = states[:, :, -width:]
        return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))

    pairs = zip(first, second, strict=True)
    return DynamicCache([(torch.cat([fit(a[0]), fit(b[0])]), torch.cat([fit(a[1]), fit(b[1])])) for a, b in pairs])
