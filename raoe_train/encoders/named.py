"""An encoder by name, and how it reads texts: what recipes say of a model, a teacher, a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from raoe_train.recipe import Option


@dataclass
class Scratch:
    """A small model with random weights, and a tokenizer trained on the training sentences."""

    architecture: Annotated[str, "bert, with WordPiece, or llama, with byte-level BPE"] = "bert"
    vocab_size: Annotated[int, "most entries of the vocabulary"] = 4000
    hidden_size: Annotated[int, "width"] = 128
    layers: Annotated[int, "transformer layers"] = 2
    heads: Annotated[int, "attention heads"] = 4
    intermediate_size: Annotated[int, "width of the feed-forward part"] = 256
    dropout: Annotated[float, "dropout of hidden states and attention"] = 0.1
    seed: Annotated[int, "seed of the random weights"] = 42


@dataclass
class Encoder:
    """Which encoder, and how its tokens become one vector."""

    name: Annotated[str | None, "encoder or SentenceTransformer, by name or path"] = None
    pooling: Annotated[
        str | None, "mean, weighted_mean, cls, max or last [as saved; else cls for ModernBERT, mean for others]"
    ] = None
    prompt: Annotated[str | None, "text around every {text}, saved with the model: 'query: {text}'"] = None
    max_seq_length: Annotated[int | None, "longer sentences are cut to this many tokens"] = None
    trust_remote_code: Annotated[bool, "run code that comes with the model"] = False
    revision: Annotated[str | None, "branch, tag or commit on the hub"] = None
    device: Annotated[str | None, "torch device; by default the best there is"] = None


@dataclass
class FrozenEncoder(Encoder):
    """An encoder that is asked and not trained: a teacher, a reference."""

    task: Annotated[str | None, "argument of its encode: the adapter of jina-embeddings-v3, say"] = None
    batch_size: Annotated[int, "sentences at a time"] = 64
    cache: Annotated[str | None, "directory that keeps what it says for other runs [until the end]"] = None


@dataclass
class Model(Encoder):
    """An encoder as it can be loaded, changed and trained."""

    name: Annotated[str, "encoder or SentenceTransformer, by name or path; scratch makes one"] = "bert-base-uncased"
    random_weights: Annotated[bool, "keep architecture and tokenizer, draw new weights (training.seed)"] = False
    dropout: Annotated[float | None, "override the encoder's dropout probabilities"] = None
    dtype: Annotated[str | None, "of the weights: float32, bfloat16 or float16 [as saved]"] = None
    attention: Annotated[str | None, "eager, sdpa or flex_attention [transformers' choice]"] = None
    bidirectional_layers: Annotated[Any, "so many of a decoder's last layers look both ways, or 'all' [as saved]"] = (
        None
    )
    bidirectional_mode: Annotated[
        str, "modify lifts their mask, sum adds causal and bidirectional output, add puts new layers on top"
    ] = "modify"
    load_in_4bit: Annotated[bool, "a decoder's weights in 4 bits (QLoRA's NF4); needs a GPU to be fast"] = False
    lora: Annotated[dict[str, Any], "train a LoRA adapter: keys of peft.LoraConfig (target_modules: all-linear)"] = (
        field(default_factory=dict)
    )
    scratch: Annotated[Scratch, Option()] = field(default_factory=Scratch)
