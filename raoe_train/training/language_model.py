"""A language model of a decoder: what one made from scratch is to know before it becomes an encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from raoe_train.encoders.bidirectional.configuration import ARCHITECTURES
from raoe_train.training.log_table import Reports
from raoe_train.training.stop_at_nan import StopsAtNaN

HELD_OUT = 50  # one sentence of so many is not trained on, and gives the perplexity


class LanguageModelTrainer(StopsAtNaN, Reports, Trainer):
    """transformers' own, which stops where a loss is not finite, and prints a table."""


def language_model_trainer(
    model: Any, datasets: Mapping[str, Any], settings: dict[str, Any]
) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """(transformers' Trainer, which makes the decoder inside `model` predict each next token; what measures it).

    The measures are {"perplexity": of held-out sentences' tokens, "tokens": trained on in an epoch}.

    Args:
        model: a SentenceTransformer that starts with a plain decoder, tied to its head, which is trained in place.
        datasets: each with a column text. A sentence is cut to the model's max_seq_length, and ends with the
            tokenizer's end-of-sequence token.
        settings: of transformers.TrainingArguments.
    """
    decoder, tokenizer = model[0].model, model.tokenizer
    if getattr(model, "hf_device_map", None):
        raise ValueError("loss causal_lm trains a decoder on one device: leave model.device_map out")
    # With a head of its own, that would be trained, too, and then thrown away.
    if decoder.config.model_type not in ARCHITECTURES or not decoder.config.tie_word_embeddings:
        raise ValueError(f"loss causal_lm trains a decoder with tied embeddings, not a {decoder.config.model_type!r}")
    whole = AutoModelForCausalLM.from_config(decoder.config)
    setattr(whole, whole.base_model_prefix, decoder)
    whole.tie_weights()
    sentences = list(dict.fromkeys(text for dataset in datasets.values() for text in dataset["text"]))
    ids = tokenizer(sentences, truncation=True, max_length=model.max_seq_length - 1)["input_ids"]
    rows = [{"input_ids": [*row, tokenizer.eos_token_id]} for row in ids]
    kept = [row for number, row in enumerate(rows) if number % HELD_OUT]
    trainer = LanguageModelTrainer(
        model=whole,
        args=TrainingArguments(**settings),
        train_dataset=Dataset.from_list(kept),
        eval_dataset=Dataset.from_list(rows[::HELD_OUT]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )

    def measures() -> dict[str, Any]:
        return {
            "perplexity": math.exp(trainer.evaluate()["eval_loss"]),
            "tokens": sum(len(row["input_ids"]) for row in kept),
        }

    return trainer, measures
