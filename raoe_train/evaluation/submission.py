"""Predictions for Conditional STS, whose test labels only its organisers have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raoe_train.data.conditional import read_conditional, split_conditional, with_conditions, write_submission
from raoe_train.encoders.embed import cosines, encode_sentences
from raoe_train.encoders.load import CONDITIONAL
from raoe_train.encoders.named import Model

if TYPE_CHECKING:
    from datasets import Dataset


def conditional_prompt(model: Any) -> str | None:
    """The prompt that a model's recipe gives, or, up to its {text}, the one with a {condition} that the model was saved
    with, or that a SentenceTransformer in memory has."""
    if not isinstance(model, Model):
        prompts = model.prompts
    elif model.prompt is not None:
        return model.prompt
    else:
        saved = Path(model.name).expanduser() / "config_sentence_transformers.json"
        prompts = json.loads(saved.read_text(encoding="utf-8")).get("prompts", {}) if saved.is_file() else {}
    return prompts[CONDITIONAL] + "{text}" if CONDITIONAL in prompts else None


def read_unlabelled(source: str, columns: dict[str, Any] | None, prompt: str | None) -> Dataset:
    """The rows to predict. ValueError where there is no prompt to put their conditions in."""
    if prompt is None or "{condition}" not in prompt:
        raise ValueError("submission needs a prompt with {condition}: train with one, or give model.prompt")
    return read_conditional(source, columns=columns or None)


def submit(model: Any, rows: Dataset, prompt: str, path: str, batch_size: int) -> int:
    """Write the cosine of each row's sentences, under its condition, as the organisers take them; how many."""
    before, _ = split_conditional(prompt)
    first, second = with_conditions(rows, before + "{text}")
    embeddings = encode_sentences(model, [*first, *second], batch_size)
    found = cosines(embeddings[: len(rows)], embeddings[len(rows) :])
    write_submission(path, found.tolist(), rows=len(rows))
    print(f"{len(rows)} predictions -> {path}")
    return len(rows)
