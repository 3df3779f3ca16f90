"""Ranking sentences with a language model: chains that move away from a sentence step by step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train.generation.decoding import Answer, Context, GuidedDecoder, Request, Sampling
    from raoe_train.generation.growth import Chain, Generation, Instructions, grow

__all__ = ["Answer", "Chain", "Context", "Generation", "GuidedDecoder", "Instructions", "Request", "Sampling", "grow"]
# Imported on first use: a decoder takes transformers, which takes seconds.
_OF_GROWTH = ("Chain", "Generation", "Instructions", "grow")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "growth" if name in _OF_GROWTH else "decoding"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
