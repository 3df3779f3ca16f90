"""Predictions for Conditional STS, whose test labels only its organisers have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.artifacts.writing import write_json
from raoe_train.data.conditional import conditional_table, is_conditional
from raoe_train.encoders.embed import cosines, encode_sentences
from raoe_train.encoders.settings import CONDITIONAL, Model

if TYPE_CHECKING:
    from datasets import Dataset


def conditional_prompt(model: Any) -> str | None:
    """The prompt that a model's recipe gives, or that with a {condition} which it was saved with, or has in memory."""
    if not isinstance(model, Model):
        prompts = model.prompts
    elif model.prompt is not None:
        return model.prompt
    else:
        saved = Path(model.name).expanduser() / "config_sentence_transformers.json"
        prompts = json.loads(saved.read_text(encoding="utf-8")).get("prompts", {}) if saved.is_file() else {}
    return prompts[CONDITIONAL] + "{text}" if CONDITIONAL in prompts else None


def read_unlabelled(source: str | None, columns: dict[str, Any] | None, prompt: str | None) -> Dataset:
    """The rows to predict, as conditional_table has them."""
    if not source:
        raise ValueError("data.input is missing: the C-STS rows to predict")
    if not is_conditional(prompt):
        raise ValueError("submission needs a prompt with {condition}: train with one, or give model.prompt")
    return conditional_table(source, str(prompt), scored=False, columns=columns)[0]


def submit(model: Any, rows: Dataset, path: str, batch_size: int) -> int:
    """Write the cosine of each row's sentences, under its condition, for C-STS's organisers to score; how many.

    The format is that of https://github.com/princeton-nlp/c-sts (commit 3bacafa; README, "Submitting Test Results"):
    one JSON object, {"0": 1.0, "1": 0.0, ...}, by the number of each row of csts_test.csv, for that repository's
    `python make_test_submission.py YOUR_EMAIL PATH`, which takes exactly 4732 predictions. Nothing is sent from here.
    """
    texts = [*rows["sentence1"][:], *rows["sentence2"][:]]
    found = cosines(*np.split(encode_sentences(model, texts, batch_size), 2))
    write_json(path, {str(row): value for row, value in enumerate(found.tolist())})
    print(f"{len(rows)} predictions -> {path}")
    return len(rows)
