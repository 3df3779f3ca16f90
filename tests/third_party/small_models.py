"""A pytest plugin for sentence-transformers' tests: a small encoder and data set in place of those of a hub.
With RAOE_TRAINER=1, rt.Trainer replaces SentenceTransformerTrainer."""

from __future__ import annotations

import functools
import os
import tempfile
from string import ascii_lowercase
from typing import Any

import pytest
import sentence_transformers
from datasets import DatasetDict
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

import raoe_train as rt
from raoe_train.encoders.load import load_encoder
from raoe_train.settings import Model

NAME = "sentence-transformers-testing/stsb-bert-tiny-safetensors"

if os.environ.get("RAOE_TRAINER"):

    class SentenceTransformerTrainer(rt.Trainer):
        """rt.Trainer by the name that their error messages contain."""

    sentence_transformers.SentenceTransformerTrainer = SentenceTransformerTrainer  # type: ignore[misc]


@functools.cache
def encoder() -> Any:
    """A BERT with two layers, 128 dimensions and random weights, like their tiny one."""
    scratch = {"vocab_size": 90, "num_attention_heads": 2}
    words = [
        "anchor positive negative short text sentence another final weather car train sunny day work",
        *ascii_lowercase,
    ]
    made = load_encoder(Model(name="scratch", device="cpu", max_seq_length=64, scratch=scratch), sentences=words)
    made.transformers_model.resize_token_embeddings(600)  # a test of theirs uses the token 500
    return made.eval()


@functools.cache
def folder() -> str:
    saved = tempfile.mkdtemp()
    encoder().save_pretrained(saved)
    return saved


def loaded() -> SentenceTransformer:
    model = SentenceTransformer(NAME)
    model.model_card_data.generate_widget_examples = False
    return model


def data() -> DatasetDict:
    splits = {"train": "train", "validation": "dev", "test": "test"}
    return DatasetDict(
        {name: rt.read_pairs(f"builtin#{ours}").remove_columns("label") for name, ours in splits.items()}
    )


def from_hub(load: Any) -> Any:
    @functools.wraps(load)
    def init(self: Any, name: Any = None, *arguments: Any, **settings: Any) -> None:
        load(self, folder() if name == NAME else name, *arguments, **settings)

    return init


SentenceTransformer.__init__ = from_hub(SentenceTransformer.__init__)  # type: ignore[method-assign]
FIXTURES = {
    "_stsb_bert_tiny_model": loaded,
    "stsb_dataset_dict": data,
    "tokenizer": lambda: Tokenizer.from_file(f"{folder()}/tokenizer.json"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    if fixturedef.argname not in FIXTURES:
        return None
    made = FIXTURES[fixturedef.argname]()
    fixturedef.cached_result = (made, fixturedef.cache_key(request), None)
    return made
