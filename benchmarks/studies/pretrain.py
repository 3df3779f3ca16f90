"""Pretrain a small Llama from scratch, as a start for decoder encoders and as a generator of chains."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from benchmarks.studies.jobs import read_texts

HELD_OUT = 50  # every 50th sentence is held out, for the perplexity
SIZES = {"vocab_size": 5000, "hidden_size": 192, "layers": 6, "heads": 6, "intermediate_size": 512}
TRAINING = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 64,
    "learning_rate": 1e-3,
    "warmup_steps": 0.05,
    "lr_scheduler_type": "cosine",
    "train_sampling_strategy": "group_by_length",
    "bf16": True,
    "logging_steps": 100,
    "save_strategy": "no",
    "report_to": "none",
}


def small_llama(
    sentences: Sequence[str],
    max_length: int,
    *,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    seed: int = 42,
) -> tuple[LlamaForCausalLM, Any]:
    """Make a Llama with random weights and its tokenizer, byte-level BPE, trained on the sentences."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    pad, start, end = special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(sentences, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[(start, 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=pad, bos_token=start, eos_token=end, model_max_length=max_length
    )
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config), tokenizer


def pretrain(
    data: Sequence[str],
    output: str,
    max_length: int = 64,
    sizes: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Pretrain a decoder and its tokenizer, and save both in OUTPUT.

    Args:
        data: files of pairs, or .txt files; an epoch has each distinct sentence once.
        output: the folder to write. `generate` reads it as a language model, `train` as an encoder.
        max_length: tokens of a sentence, its end included; longer ones are cut.
        sizes: changes of SIZES.
        training: changes of TRAINING, transformers.TrainingArguments.

    Returns:
        {"perplexity": of the held-out sentences, "tokens": trained on in an epoch, "parameters"}.
    """
    if Path(output).exists():
        raise ValueError(f"{output} exists: choose another output")
    sentences = list(dict.fromkeys(text for source in data for text in read_texts(source)))
    settings = {**TRAINING, "disable_tqdm": not sys.stderr.isatty(), **(training or {})}
    arguments = TrainingArguments(output, **settings)
    model, tokenizer = small_llama(sentences, max_length, **{**SIZES, **(sizes or {})}, seed=arguments.seed)
    ids = tokenizer(sentences, truncation=True, max_length=max_length - 1)["input_ids"]
    rows = [{"input_ids": [*row, tokenizer.eos_token_id]} for row in ids]
    train = [row for number, row in enumerate(rows) if number % HELD_OUT]
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(rows[::HELD_OUT]),
    )
    trainer.train()
    summary = {
        "perplexity": math.exp(trainer.evaluate()["eval_loss"]),
        "tokens": sum(len(row["input_ids"]) for row in train),
        "parameters": model.num_parameters(),
    }
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"perplexity {summary['perplexity']:.1f} on {len(rows[::HELD_OUT])} held-out sentences; saved to {output}")
    return summary
