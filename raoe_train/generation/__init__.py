"""Ranking sentences with a language model: chains that move away from a sentence step by step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train.generation.decoding import Answer, Context, GuidedDecoder, Request
    from raoe_train.generation.growth import Chain, Generation, grow
    from raoe_train.generation.instructions import Instructions
    from raoe_train.generation.models import LanguageModel, load_language_model, load_tokenizer
    from raoe_train.generation.sampling import Sampling
    from raoe_train.generation.seeds import Seeds, select_seeds

# Imported on first use: the decoder takes transformers, which takes seconds.
_HOMES = {
    "decoding": ("Answer", "Context", "GuidedDecoder", "Request"),
    "growth": ("Chain", "Generation", "grow"),
    "instructions": ("Instructions",),
    "models": ("LanguageModel", "load_language_model", "load_tokenizer"),
    "sampling": ("Sampling",),
    "seeds": ("Seeds", "select_seeds"),
}
__all__ = [
    "Answer", "Chain", "Context", "Generation", "GuidedDecoder", "Instructions", "LanguageModel", "Request", "Sampling",
    "Seeds", "grow", "load_language_model", "load_tokenizer", "select_seeds",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
