"""Settings of encoders: the sections of recipes for a model, a teacher or a reference."""

import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypedDict

from raoe_train.config import Folder, NonNegativeInt, PositiveInt, Seed, Share, Source, Unrecorded, merge

SCRATCH = "scratch"  # value of model.name for a new model
CONDITIONAL = "conditional"  # name of the prompt with {condition} in a model's `prompts`
# {kind of text: names that its prompt can have}, as in encode_query and encode_document of sentence-transformers
PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
Dtype = Literal["float32", "bfloat16", "float16"]
Changes = TypedDict("Changes", {  # fields of Model, for type checkers  # noqa: UP013
    "name": str, "pooling": Literal["mean", "weighted_mean", "cls", "max", "last"] | None, "prompt": str | None,
    "max_seq_length": int | None, "trust_remote_code": bool, "revision": str | None, "attention": str | None,
    "device": str | None, "random_weights": bool, "dtype": Dtype | None, "device_map": str | None,
    "bidirectional_layers": int | Literal["all"] | None, "load_in_4bit": bool | None, "lora": dict[str, Any],
    "training_head": bool, "scratch": Any,
}, total=False)  # fmt: skip


@dataclass
class Scratch:
    """A small BERT with random weights, and a WordPiece tokenizer trained on the training sentences.

    Args:
        vocab_size: maximum size of the vocabulary
        hidden_size: width of the hidden states
        layers: number of transformer layers
        heads: number of attention heads
        intermediate_size: width of the feed-forward layers
        dropout: dropout probability of hidden states and attention
        seed: seed for the random weights
    """

    vocab_size: PositiveInt = 4000
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    intermediate_size: PositiveInt = 256
    dropout: Share = 0.1
    seed: Seed = 42


@dataclass
class Encoder:
    """An encoder to load, and how it embeds texts.

    Args:
        name: encoder or SentenceTransformer, by path or hub name
        pooling: pooling of token states; by default, the saved pooling; without a saved pooling, cls for ModernBERT and
            SimCSE models, and mean for all other models
        prompt: template for every text, such as 'query: {text}'; saved with the model
        max_seq_length: maximum number of tokens; longer texts are truncated
        trust_remote_code: run custom code from the model's repository
        revision: branch, tag or commit on the hub
        attention: attention implementation, such as raoe_packed; by default, the choice of transformers
        device: torch device; by default, an accelerator if there is one, else cpu
    """

    name: Source | None = None
    pooling: Literal["mean", "weighted_mean", "cls", "max", "last"] | None = None
    prompt: str | None = None
    max_seq_length: PositiveInt | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str | None = None
    device: Unrecorded[str | None] = None


@dataclass
class FrozenEncoder(Encoder):
    """An encoder that is used but not trained, such as a teacher or a reference.

    Args:
        prompt: template for every text, such as 'query: {text}'; a prompt without {text} is added before each text
        task: argument `task` of the encoder's encode method, such as text-matching for jina-embeddings-v3
        batch_size: sentences to encode at a time
        cache: directory in which embeddings are cached for later runs
    """

    prompt: str | None = None
    task: str | None = None
    batch_size: Unrecorded[PositiveInt] = 64
    cache: Folder | None = None


@dataclass
class Model(Encoder):
    """An encoder to load, and the changes to make before training.

    Args:
        name: encoder or SentenceTransformer, by path or hub name; scratch makes a new model
        random_weights: use the architecture and tokenizer of model.name, but draw new weights
        dtype: dtype of the weights; by default, the saved dtype
        device_map: device_map of transformers; auto spreads the model over all GPUs
        bidirectional_layers: number of a decoder's last layers (or all) that attend in both directions
        load_in_4bit: load the weights of a decoder in 4 bits (NF4 of QLoRA); fast only on a GPU; by default, only the
            base model of an adapter that was trained on 4-bit weights
        lora: train a LoRA adapter with these fields of peft.LoraConfig, such as r
        training_head: during training, add SimCSE's linear layer and tanh on top of the embedding
        scratch: architecture of the new model if model.name is scratch
    """

    name: Source = ""
    random_weights: bool = False
    dtype: Dtype | None = None
    device_map: Unrecorded[str | None] = None
    bidirectional_layers: NonNegativeInt | Literal["all"] | None = None
    load_in_4bit: bool | None = None
    lora: dict[str, Any] = field(default_factory=dict)
    training_head: bool = False
    scratch: Scratch | None = None


def as_model(encoder: Encoder | str, **changes: Any) -> Model:
    """Convert an encoder's name, or another Encoder section (such as a FrozenEncoder), to a Model; apply `changes`."""
    if isinstance(encoder, Model) and not changes:
        return encoder
    settings: dict[str, Any] = asdict(encoder) if isinstance(encoder, Encoder) else {"name": os.fspath(encoder)}
    names = {each.name for each in fields(Model)}
    return merge(Model, [{key: value for key, value in settings.items() if key in names}, changes], "model.")
