"""Load an encoder: a Hugging Face model with pooling, a saved SentenceTransformer, or a new small model. A decoder can
have bidirectional layers, an adapter and 4-bit weights."""

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import ORIGINAL_TRANSFORMER_MODELS, is_sentence_transformer_model
from transformers import BitsAndBytesConfig
from typing_extensions import Unpack

from raoe_train import settings
from raoe_train.config import merge
from raoe_train.data.pairs import is_conditional, split_conditional
from raoe_train.encoders import preflight
from raoe_train.encoders.bidirectional import register
from raoe_train.encoders.bidirectional.configuration import ARCHITECTURES
from raoe_train.encoders.bidirectional.modeling import PACKED, BidirectionalModel, set_adapter_weights
from raoe_train.encoders.packed import pack
from raoe_train.encoders.prompts import apply_template
from raoe_train.encoders.scratch import add_head, add_lora, scratch_transformer
from raoe_train.settings import CONDITIONAL, SCRATCH, Encoder, Model

logger = logging.getLogger(__name__)

# {raoe's name: sentence-transformers' name}
POOLING = {"mean": "mean", "weighted_mean": "weightedmean", "cls": "cls", "max": "max", "last": "lasttoken"}
# Names of models trained with SimCSE's code. They pool the first token, but their files do not record the pooling.
FIRST_TOKEN = re.compile(r"(?:sim|diff|syn|rank|info|prom)cse|multi-?csr", re.IGNORECASE)
ALL = "all"  # a value of bidirectional_layers
Changes = TypedDict("Changes", {  # the fields of Model, for type checkers  # noqa: UP013
    "name": str, "pooling": settings.Pooling | None, "prompt": str | None, "max_seq_length": int | None,
    "trust_remote_code": bool, "revision": str | None, "attention": str | None, "device": str | None,
    "dtype": settings.Dtype | None, "device_map": str | None, "bidirectional_layers": int | Literal["all"] | None,
    "load_in_4bit": bool | None, "lora": dict[str, Any], "training_head": bool, "scratch": dict[str, Any],
}, total=False)  # fmt: skip


def load_encoder(
    encoder: Encoder | str,
    *,
    sentences: Iterable[str] | None = None,
    seed: int = 42,
    train: bool = False,
    **changes: Unpack[Changes],
) -> SentenceTransformer:
    """Load an encoder as a SentenceTransformer.

    Args:
        encoder: path or hub name, or an Encoder (a section of a recipe). A saved SentenceTransformer keeps its pooling
            by default. If no pooling is saved, ModernBERT (Table 5 of the RAOE paper) and models with a SimCSE-like
            name use cls pooling. All others use mean pooling, with a warning unless the encoder is a well-known
            language model.
        sentences: texts to train the tokenizer on, if the model is created from scratch.
        seed: seed for new weights.
        train: prepare for training: add the adapter `lora`, and convert trainable 16-bit weights to float32 (unless
            `dtype` is set without `lora`). Passing `lora` in `changes` implies train=True. The encoder's attribute
            `saved_dtypes` stores the original dtypes of the converted weights.
        changes: fields of raoe_train.settings.Model that override those of `encoder`.

    Raise ValueError for an invalid setting, and FileNotFoundError for a missing path.
    """
    register()
    spec = as_model(encoder, **changes)
    train = train or bool(changes.get("lora"))
    _check(spec, train)
    if spec.name == SCRATCH:
        model = _new(spec, sentences, seed)
    else:
        with preflight.loading(spec.name), _seeded(seed):
            model = _load(spec)
        check_vocabulary(model)
        if not spec.load_in_4bit:
            check_whole(model, spec.name, spec.trust_remote_code)
    _change_layers(model, spec, seed, train)
    if spec.attention == PACKED and (reason := pack(model)):
        raise ValueError(f"model.attention {PACKED} cannot be used with {spec.name}: {reason}")
    _set_length(model, spec)
    if is_conditional(spec.prompt):  # in C-STS, the prefix depends on the row
        prefix, suffix = split_conditional(str(spec.prompt))
        apply_template(model, "{text}" + suffix)
        model.prompts = {**model.prompts, CONDITIONAL: prefix}
    elif spec.prompt is not None:
        apply_template(model, spec.prompt)
    if train and spec.training_head:
        add_head(model, seed, saved=_takes_first(spec.name, model.transformers_model.config))
    if spec.pooling == "last" and not train:  # in training, the trainer warns
        warn_without_end(model)
    model.saved_dtypes = low = low_precision(model) if train and (spec.dtype is None or spec.lora) else {}
    if low:
        convert_parameters(model, dict.fromkeys(low, torch.float32))
        kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in low.values()}))
        print(f"{len(low)} weights in {kinds} are trained in float32, and saved in {kinds}")
    return model


def _new(spec: Model, sentences: Iterable[str] | None, seed: int) -> Any:
    if sentences is None:
        raise ValueError(f"model.name {SCRATCH!r} works only in the job train: set model.name to an existing encoder")
    transformer = scratch_transformer(spec.scratch, sentences, spec.max_seq_length, seed)
    pooling = Pooling(transformer.get_embedding_dimension(), POOLING[spec.pooling or "mean"])
    return SentenceTransformer(modules=[transformer, pooling], device=spec.device)


def _change_layers(model: Any, spec: Model, seed: int, train: bool) -> None:
    """Add the bidirectional layers and, for training, the adapter that the settings specify."""
    if not isinstance(model[0], Transformer):
        if spec.load_in_4bit or spec.lora or spec.bidirectional_layers is not None:
            options = "LoRA, 4-bit weights or bidirectional layers"
            raise ValueError(f"{spec.name}: the custom module {type(model[0]).__name__} does not support {options}")
        return
    with _seeded(seed):
        _wrap_decoder(model, spec, train)
        inner = model[0].model
        decoder = inner.decoder if isinstance(inner, BidirectionalModel) else None
        if train and (spec.lora or (decoder is not None and inner.has_adapter)):
            add_lora(inner if decoder is None else decoder, spec.lora)


def as_model(encoder: Encoder | str, **changes: Any) -> Model:
    """Convert an encoder's name, or an Encoder configuration such as a FrozenEncoder, to a Model. Apply `changes`."""
    if isinstance(encoder, Model) and not changes:
        return encoder
    values: dict[str, Any] = asdict(encoder) if isinstance(encoder, Encoder) else {"name": os.fspath(encoder)}
    names = {each.name for each in fields(Model)}
    return merge(Model, [{key: value for key, value in values.items() if key in names}, changes], "model.")


def low_precision(model: Any) -> dict[str, torch.dtype]:
    """Return {name: dtype} of the trainable 16-bit parameters, in which small updates would be lost to rounding."""
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    return {name: weight.dtype for name, weight in weights if weight.dtype in (torch.bfloat16, torch.float16)}


def convert_parameters(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Convert parameters in place. `dtypes` is {parameter name: new dtype}."""
    for name, weight in model.named_parameters():
        weight.data = weight.data.to(dtypes.get(name, weight.dtype))


def warn_without_end(model: Any) -> None:
    """Warn if last-token pooling would pool a token of the text, because the tokenizer adds no end token."""
    tokenizer = getattr(model, "tokenizer", None)
    is_last = any("lasttoken" in each.pooling_mode for each in model.modules() if isinstance(each, Pooling))
    if is_last and callable(tokenizer):
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        if tokenizer("a")["input_ids"][-len(plain) :] == plain:
            end = f"{{text}}{tokenizer.eos_token or '...'}"
            logger.warning("the tokenizer adds no end token, so last-token pooling uses a token of the last word: "
                           "set model.prompt to '%s'", end)  # fmt: skip


def warn_without_cosine(model: Any) -> None:
    """Warn if the similarity function of a SentenceTransformer is not cosine similarity."""
    if (name := getattr(model, "_similarity_fn_name", None)) not in (None, "cosine"):
        logger.warning("the encoder's similarity function is %s, but raoe trains and evaluates with cosine similarity: "
                       "raoe's results do not apply to %s", name, name)  # fmt: skip


def check_vocabulary(model: Any) -> None:
    """Raise ValueError if the embedding table has no row for the padding token, because such an encoder cannot be
    loaded again after it is saved. Warn if other tokens are not in the table, because they cannot be encoded."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    table = getattr(getattr(model, "transformers_model", None), "get_input_embeddings", lambda: None)()
    rows = getattr(table, "num_embeddings", sys.maxsize)
    lost = [token for token, number in getattr(tokenizer, "get_vocab", dict)().items() if number >= rows]
    problem = f"the embedding table ({rows} rows) has no row for {len(lost)} of the tokens"
    advice = "call the model's resize_token_embeddings(len(tokenizer)) and save the model"
    if lost and tokenizer.pad_token in lost:
        raise ValueError(f"{problem}, including the padding token {tokenizer.pad_token!r}: {advice}")
    if lost:
        logger.warning("%s, such as %r: %s", problem, lost[0], advice)


def check_whole(model: Any, name: str, foreign: bool = False) -> None:
    """Raise ValueError if an encoder is incomplete, because missing weights would be initialized randomly. The
    tokenizer must have at least half as many tokens as the embedding table has rows, because a missing tokenizer would
    be replaced by an empty one. A pooler may be missing, because embeddings do not use it. If the model runs custom
    code (`foreign`), only warn, because this code may set weights later."""
    inner = model[0].model if isinstance(model[0], Transformer) else None
    if inner is None or getattr(inner.config, "base_model", None):  # an adapter is checked while loading
        return
    words, rows = len(model.tokenizer), inner.get_input_embeddings().weight.shape[0]
    if 2 * words < rows and not foreign:
        problem = f"its tokenizer has {words} tokens, but its embedding table has {rows} rows"
        raise ValueError(f"{name} is incomplete: {problem}")
    # transformers marks loaded weights; weights that a device_map left on disk are on the meta device
    parameters = [(key, each) for key, each in inner.named_parameters() if not each.is_meta]
    unset = [key for key, each in parameters if not getattr(each, "_is_hf_initialized", False)]
    if missing := [key for key in unset if "lora_" not in key and "pooler." not in key]:
        names = ", ".join(missing[:3])
        problem = f"{name} is incomplete: {len(missing)} weights are missing and would be initialized randomly: {names}"
        if not foreign:
            raise ValueError(problem)
        logger.warning("%s", problem)


def _check(spec: Model, train: bool) -> None:
    if not spec.name:
        raise ValueError("model.name is missing: set it to the path or hub name of an encoder")
    if spec.load_in_4bit and train and not spec.lora:
        raise ValueError("4-bit weights cannot be trained: set model.lora, or set model.load_in_4bit to false")
    if spec.name == SCRATCH and (spec.lora or spec.load_in_4bit or spec.training_head):
        needs = "model.lora, model.load_in_4bit and model.training_head need a pretrained model"
        raise ValueError(f"{needs}, but model.name is {SCRATCH!r}: set it to a pretrained model")
    preflight.check_device(spec.device)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _load(spec: Model) -> Any:
    folder, name = Path(spec.name).expanduser(), spec.name
    if folder.is_dir():
        name = str(folder)
    elif "/" not in name and name.lower() not in ORIGINAL_TRANSFORMER_MODELS:
        name = f"sentence-transformers/{name}"  # as sentence-transformers does
    weights: dict[str, Any] = {"dtype": spec.dtype, "device_map": spec.device_map}
    weights["attn_implementation"] = spec.attention
    quantization = preflight.four_bit(spec.dtype) if spec.load_in_4bit else None
    if quantization:
        weights["quantization_config"] = BitsAndBytesConfig(**quantization)
    model: Any = SentenceTransformer(
        name,
        device=spec.device,
        trust_remote_code=spec.trust_remote_code,
        revision=spec.revision,
        model_kwargs={key: value for key, value in weights.items() if value is not None},
        config_kwargs=None if spec.load_in_4bit is None else {"base_quantization": quantization},
    )
    inner = getattr(model[0], "model", None)
    if getattr(inner, "_hf_peft_config_loaded", False):  # BidirectionalModel has done this
        set_adapter_weights(inner, name, {"revision": spec.revision} if spec.revision else {})
    tokenizer = getattr(model[0], "tokenizer", None)
    if isinstance(model[0], Transformer) and tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # many decoders have no padding token
    pooling, bare = spec.pooling, not is_sentence_transformer_model(name, revision=spec.revision)
    if bare and pooling is None:
        pooling = _usual_pooling(spec.name, model[0].model.config)
    if bare:  # otherwise a chat template could add a system message to each text
        model[0].modality_config.pop("message", None)
    if pooling is not None:
        places = [place for place, module in model.named_children() if isinstance(module, Pooling)]
        if len(places) != 1:
            raise ValueError(f"model.pooling cannot be changed: {spec.name} has {len(places)} pooling modules, not 1")
        # Replace only this module, so that the other modules keep their order and names.
        model._modules[places[0]] = Pooling(model._modules[places[0]].embedding_dimension, POOLING[pooling])
    return model


def _usual_pooling(name: str, config: Any) -> Literal["cls", "mean"]:
    if _takes_first(name, config) or config.model_type == "modernbert":
        return "cls"
    if name.rpartition("/")[2].lower() not in ORIGINAL_TRANSFORMER_MODELS:
        advice = "to choose the pooling mode, set model.pooling to mean, cls or last"
        logger.warning("%s does not define its pooling, so mean pooling is used; %s", name, advice)
    return "mean"


def _takes_first(name: str, config: Any) -> bool:
    return any(FIRST_TOKEN.search(str(each)) for each in (Path(name).name, config.name_or_path))


def _wrap_decoder(model: Any, spec: Model, train: bool) -> None:
    """Wrap a decoder in a BidirectionalModel if bidirectional_layers is set. Also wrap a decoder with 4-bit weights or
    a trainable adapter, because the wrapper saves an adapter together with the name of its base model."""
    layers, inner = spec.bidirectional_layers, model[0].model
    has_lora = train and bool(spec.lora)
    folder = Path(spec.name).expanduser()  # saved as an absolute path, because the adapter is in a different folder
    base = {
        "base_model": str(folder.resolve()) if folder.is_dir() else spec.name,
        "base_revision": spec.revision,
        "base_quantization": preflight.four_bit(spec.dtype) if spec.load_in_4bit else None,
    }
    if isinstance(inner, BidirectionalModel):
        config = inner.config
        depth = len(inner.decoder.layers) if layers == ALL else layers
        if depth not in (None, config.bidirectional_layers):
            problem = f"already has {config.bidirectional_layers} bidirectional layers"
            raise ValueError(f"{spec.name} {problem}: remove model.bidirectional_layers")
        if has_lora and not inner.has_adapter:
            config.update(base)
    else:
        kind = inner.config.model_type
        if spec.load_in_4bit and kind not in ARCHITECTURES:
            raise ValueError(f"model.load_in_4bit needs a decoder of type {', '.join(ARCHITECTURES)}, got {kind!r}")
        if layers is None and not (kind in ARCHITECTURES and (spec.load_in_4bit or has_lora)):
            return
        count: Any = inner.config.num_hidden_layers if layers == ALL else layers or 0
        model[0].model = BidirectionalModel.around(inner, count, **base)


def _set_length(model: Any, spec: Model) -> None:
    if spec.max_seq_length is not None:
        model.max_seq_length = spec.max_seq_length
    length = model.max_seq_length
    if length is None:
        return
    limit = getattr(getattr(model.transformers_model, "config", None), "max_position_embeddings", None)
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            limit = table.num_embeddings - table.padding_idx - 1  # RoBERTa reserves the first positions for padding
    if limit is not None and length > limit:
        if spec.max_seq_length is not None:
            raise ValueError(f"model.max_seq_length {length} is too large: the encoder has only {limit} positions")
        model.max_seq_length = length = limit
    special = getattr(getattr(model, "tokenizer", None), "num_special_tokens_to_add", int)(False)
    if length <= special:
        problem = f"leaves no room for text: {spec.name} adds {special} special tokens to each text"
        raise ValueError(f"model.max_seq_length {length} {problem}; increase max_seq_length")
