"""Ranking sentences with a language model: chains that move away from a sentence step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train.config import GenerateConfig

__all__ = ["generate"]


def generate(config: GenerateConfig) -> dict[str, Any]:
    """The job `generate`; see raoe_train.generation.chains."""
    from raoe_train.generation.chains import generate as job

    return job(config)
