"""An encoder by name, and how it reads texts: what recipes say of a model, a teacher, a reference."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from raoe_train.artifacts.provenance import fingerprint
from raoe_train.recipe import Option, convert, parameters

SCRATCH = "scratch"  # the name of a model that is made
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass
class Scratch:
    """A small model with random weights, and a tokenizer trained on the training sentences."""

    architecture: Annotated[Literal["bert", "llama"], "bert, with WordPiece, or llama, with byte-level BPE"] = "bert"
    vocab_size: Annotated[int, Option("most entries of the vocabulary", least=1)] = 4000
    hidden_size: Annotated[int, Option("width", least=1)] = 128
    layers: Annotated[int, Option("transformer layers", least=1)] = 2
    heads: Annotated[int, Option("attention heads", least=1)] = 4
    intermediate_size: Annotated[int, Option("width of the feed-forward part", least=1)] = 256
    dropout: Annotated[float, Option("dropout of hidden states and attention", least=0, below=1)] = 0.1
    seed: Annotated[int, Option("seed of the random weights", least=0, below=2**32)] = 42


@dataclass
class Encoder:
    """Which encoder, and how its tokens become one vector."""

    name: Annotated[str | None, "encoder or SentenceTransformer, by name or path"] = None
    pooling: Annotated[
        Literal["mean", "weighted_mean", "cls", "max", "last"] | None,
        "mean, weighted_mean, cls, max or last [as saved; else cls for ModernBERT and SimCSE's kin, mean for others]",
    ] = None
    prompt: Annotated[str | None, "text around every {text}, saved with the model: 'query: {text}'"] = None
    max_seq_length: Annotated[int | None, Option("longer sentences are cut to this many tokens", least=1)] = None
    trust_remote_code: Annotated[bool, "run code that comes with the model"] = False
    revision: Annotated[str | None, "branch, tag or commit on the hub"] = None
    device: Annotated[str | None, "torch device; by default the best there is"] = None


@dataclass
class FrozenEncoder(Encoder):
    """An encoder that is asked and not trained: a teacher, a reference."""

    prompt: Annotated[str | None, "text around every {text}, or before each text where it has no {text}"] = None
    task: Annotated[str | None, "argument of its encode: the adapter of jina-embeddings-v3, say"] = None
    batch_size: Annotated[int, Option("sentences at a time", least=1)] = 64
    cache: Annotated[
        str | None, Option("directory that keeps what it says for other runs [until the end]", writes="folder")
    ] = None


@dataclass
class Model(Encoder):
    """An encoder as it can be loaded, changed and trained."""

    name: Annotated[str, "encoder or SentenceTransformer, by name or path; scratch makes one"] = "bert-base-uncased"
    random_weights: Annotated[bool, "keep architecture and tokenizer, draw new weights (training.seed)"] = False
    dropout: Annotated[float | None, Option("override the encoder's dropout probabilities", least=0, below=1)] = None
    dtype: Annotated[Dtype | None, "of the weights: float32, bfloat16 or float16 [as saved]"] = None
    attention: Annotated[str | None, "eager, sdpa or flex_attention [transformers' choice]"] = None
    device_map: Annotated[str | None, "transformers' device_map: auto spreads the model over all GPUs"] = None
    bidirectional_layers: Annotated[
        int | Literal["all"] | None,
        Option("so many of a decoder's last layers look both ways, or 'all' [as saved]", least=0),
    ] = None
    bidirectional_mode: Annotated[
        Literal["modify", "add"],
        "modify lifts the causal mask of existing layers, add puts new layers on top",
    ] = "modify"
    load_in_4bit: Annotated[bool, "a decoder's weights in 4 bits (QLoRA's NF4); needs a GPU to be fast"] = False
    lora: Annotated[dict[str, Any], "train a LoRA adapter: keys of peft.LoraConfig (target_modules: all-linear)"] = (
        field(default_factory=dict)
    )
    training_head: Annotated[bool, "SimCSE's linear layer and tanh over the embedding, while it is trained"] = False
    scratch: Annotated[Scratch, Option()] = field(default_factory=Scratch)


def as_model(encoder: Encoder | str, **changes: Any) -> Model:
    """All that can be said of an encoder, from its name or a section that says less, with `changes` on top. ValueError
    for an unknown key, or a value that cannot be."""
    said: dict[str, Any] = {"name": encoder} if isinstance(encoder, str) else asdict(encoder)
    shared = {key: said[key] for key in parameters(Model) if key in said}
    return convert(Model, {**shared, **changes}, "model")


def settings_said(encoder: FrozenEncoder) -> dict[str, Any]:
    """The name, and what else is said beyond the defaults and has a part in embeddings: not where and how fast."""
    plain, runs = asdict(FrozenEncoder()), ("device", "batch_size", "cache")
    return {key: value for key, value in asdict(encoder).items() if value != plain[key] and key not in runs}


def second_of(encoder: Any) -> FrozenEncoder | None:
    """The encoder that is asked beside another one, of a teacher that names two."""
    second = getattr(encoder, "second", None)
    return second if second is not None and second.name else None


def identity(model: Any) -> dict[str, Any]:
    """What decides on what a model gives: its section of the recipe but for where and how fast it runs, and its files'
    fingerprint. Of an Encoder, or a section that says all there is (a language model's)."""
    said = asdict(as_model(model) if isinstance(model, Encoder) else model)
    task = {"task": model.task} if getattr(model, "task", None) is not None else {}
    said = {key: value for key, value in said.items() if key not in ("device_map", "training_head")}
    beside = {"second": identity(second)} if (second := second_of(model)) is not None else {}
    return {**said, **task, **beside, "device": None, "files": fingerprint(said["name"])}
