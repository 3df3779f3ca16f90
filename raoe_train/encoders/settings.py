"""Which encoder, and how it reads texts: what recipes say of a model, a teacher, a reference."""

import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from raoe_train.artifacts.provenance import fingerprint
from raoe_train.config import NonNegativeInt, PositiveInt, Seed, Share, make

SCRATCH = "scratch"  # the name of a model that is made
CONDITIONAL = "conditional"  # among a model's prompts: the one that has a {condition}
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass
class Scratch:
    """A small model with random weights, and a tokenizer trained on the training sentences.

    Args:
        architecture: bert, with WordPiece, or llama, with byte-level BPE
        vocab_size: largest size of the vocabulary
        hidden_size: width
        layers: transformer layers
        heads: attention heads
        intermediate_size: width of the feed-forward layers
        dropout: dropout of hidden states and attention
        seed: seed of the random weights
    """

    architecture: Literal["bert", "llama"] = "bert"
    vocab_size: PositiveInt = 4000
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    intermediate_size: PositiveInt = 256
    dropout: Share = 0.1
    seed: Seed = 42


@dataclass
class Encoder:
    """Which encoder, and how its tokens become one vector.

    Args:
        name: encoder or SentenceTransformer, by path or hub name
        pooling: how tokens become one vector; by default as saved, else cls for ModernBERT and SimCSE, mean for others
        prompt: text around every {text}, saved with the model, such as 'query: {text}'
        max_seq_length: cut longer sentences to so many tokens
        trust_remote_code: run code that comes with the model
        revision: branch, tag or commit on the hub
        device: torch device; by default the best there is
    """

    name: str | None = None
    pooling: Literal["mean", "weighted_mean", "cls", "max", "last"] | None = None
    prompt: str | None = None
    max_seq_length: PositiveInt | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    device: str | None = None


@dataclass
class FrozenEncoder(Encoder):
    """An encoder that is asked and not trained: a teacher, a reference.

    Args:
        prompt: text around every {text}, or before each text where it has no {text}
        task: argument of its encode, such as an adapter of jina-embeddings-v3
        batch_size: sentences at a time
        cache: directory that keeps its embeddings for other runs
    """

    prompt: str | None = None
    task: str | None = None
    batch_size: PositiveInt = 64
    cache: str | None = None


@dataclass
class Model(Encoder):
    """An encoder as it can be loaded, changed and trained.

    Args:
        name: encoder or SentenceTransformer, by path or hub name; scratch makes a new one
        random_weights: keep architecture and tokenizer, draw new weights
        dropout: override the dropout probabilities of the encoder
        dtype: dtype of the weights; by default as saved
        attention: attention implementation; by default as transformers chooses
        device_map: device_map of transformers; auto spreads the model over all GPUs
        bidirectional_layers: number of last layers of a decoder that attend in both directions, or all
        load_in_4bit: load the weights of a decoder in 4 bits (NF4 of QLoRA); needs a GPU to be fast
        lora: train a LoRA adapter with these keys of peft.LoraConfig
        training_head: SimCSE's linear layer and tanh over the embedding, in training only
        scratch: architecture of a model that is made (name scratch)
    """

    name: str = ""
    random_weights: bool = False
    dropout: Share | None = None
    dtype: Dtype | None = None
    attention: str | None = None
    device_map: str | None = None
    bidirectional_layers: NonNegativeInt | Literal["all"] | None = None
    load_in_4bit: bool = False
    lora: dict[str, Any] = field(default_factory=dict)
    training_head: bool = False
    scratch: Scratch | None = None


def as_model(encoder: Encoder | str, **changes: Any) -> Model:
    """The Model of an encoder's name, or of a section that says less, with `changes` on top."""
    if isinstance(encoder, Model) and not changes:
        return encoder
    said: dict[str, Any] = asdict(encoder) if isinstance(encoder, Encoder) else {"name": os.fspath(encoder)}
    known = {each.name for each in fields(Model)}
    return make(Model, "model", **{key: value for key, value in said.items() if key in known} | changes)


def settings_said(encoder: FrozenEncoder) -> dict[str, Any]:
    """The name, and settings beyond the defaults that have a part in embeddings."""
    plain, runs = asdict(FrozenEncoder()), ("device", "batch_size", "cache")
    return {key: value for key, value in asdict(encoder).items() if value != plain[key] and key not in runs}


def second_of(encoder: Any) -> FrozenEncoder | None:
    """The second encoder of a teacher that has two."""
    return getattr(encoder, "second", None)


def identity(model: Any) -> dict[str, Any]:
    """What decides on what a model gives: the settings of an Encoder or LanguageModel, but not where and how fast it
    runs, and its files' fingerprint."""
    said = asdict(as_model(model) if isinstance(model, Encoder) else model)
    said = {key: value for key, value in said.items() if key not in ("device_map", "training_head")}
    if getattr(model, "task", None) is not None:
        said["task"] = model.task
    if (second := second_of(model)) is not None:
        said["second"] = identity(second)
    return {**said, "device": None, "files": fingerprint(said["name"])}
