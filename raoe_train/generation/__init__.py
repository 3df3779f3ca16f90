"""Ranking sentences with a language model: chains that move away from a sentence step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raoe_train.artifacts.lazy import exports

if TYPE_CHECKING:
    from raoe_train.generation.decoding import Answer, Context, GuidedDecoder, Request, Sampling
    from raoe_train.generation.growth import Chain, Generation, Instructions, grow

__all__ = ["Answer", "Chain", "Context", "Generation", "GuidedDecoder", "Instructions", "Request", "Sampling", "grow"]
__getattr__ = exports(
    __name__,
    {
        "decoding": ("Answer", "Context", "GuidedDecoder", "Request", "Sampling"),
        "growth": ("Chain", "Generation", "Instructions", "grow"),
    },
)
