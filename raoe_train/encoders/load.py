"""Encoders: a Hugging Face model with pooling, a saved SentenceTransformer, or a small one made from scratch; decoders
with bidirectional layers, adapters and 4-bit weights among them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from raoe_train.config import ModelConfig

logger = logging.getLogger(__name__)

# our name: sentence-transformers' name
POOLING = {
    "mean": "mean",
    "weighted_mean": "weightedmean",
    "cls": "cls",
    "max": "max",
    "last": "lasttoken",
}
SCRATCH = "scratch"
DTYPES = ("float32", "bfloat16", "float16")
ALL = "all"  # of bidirectional_layers
CONDITIONAL = "conditional"  # the prompt that has a {condition}, among a model's prompts


def load_encoder(
    config: ModelConfig, *, sentences: Iterable[str] | None = None, seed: int = 42, train: bool = False
) -> Any:
    """The SentenceTransformer that `config` describes.

    Args:
        config: see ModelConfig. Pooling defaults to what a SentenceTransformer was saved with; for a bare encoder to
            cls for ModernBERT and mean for all others (the RAOE paper's Table 5).
        sentences: what the tokenizer of a model made from scratch is trained on.
        seed: of the weights that are new: of a random model, an adapter, added layers.
        train: put config.lora's adapter in.

    Raises:
        ValueError: a setting that cannot be, or no sentences for a model from scratch.
        FileNotFoundError: a path that is not there.
    """
    import torch
    from sentence_transformers import SentenceTransformer

    from raoe_train.encoders.bidirectional import register

    register()
    _check(config, train)
    if config.name == SCRATCH:
        from raoe_train.encoders.scratch import scratch_transformer

        if sentences is None:
            raise ValueError(f"model.name {SCRATCH!r} makes a new model, which only training can do")
        transformer = scratch_transformer(config.scratch, sentences, config.max_seq_length)
        model = SentenceTransformer(modules=[transformer, _pooling(transformer, config.pooling)], device=config.device)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _load(config)
    if config.random_weights:
        _draw_weights(model, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _as_decoder(model, config, train)
        if train:
            _add_adapter(model[0].model, config.lora)
    if config.max_seq_length is not None:
        model.max_seq_length = config.max_seq_length
    _check_positions(model)
    if config.prompt is not None:
        _apply_prompt(model, config.prompt)
    return model


def _apply_prompt(model: Any, prompt: str) -> None:
    from raoe_train.data.conditional import is_conditional, split_conditional
    from raoe_train.encoders.prompts import apply_template

    if is_conditional(prompt):  # up to the sentence each text has its own
        before, after = split_conditional(prompt)
        apply_template(model, "{text}" + after)
        model.prompts = {**model.prompts, CONDITIONAL: before}
    else:
        apply_template(model, prompt)


def _check(config: ModelConfig, train: bool) -> None:
    from raoe_train.encoders.bidirectional.configuration import MODES

    layers = config.bidirectional_layers
    if config.pooling is not None and config.pooling not in POOLING:
        raise ValueError(f"model.pooling must be one of {', '.join(POOLING)}, got {config.pooling!r}")
    if config.dtype is not None and config.dtype not in DTYPES:
        raise ValueError(f"model.dtype must be one of {', '.join(DTYPES)}, got {config.dtype!r}")
    if layers not in (None, ALL) and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 0):
        raise ValueError(f"model.bidirectional_layers must be a whole number or {ALL!r}, got {layers!r}")
    if config.bidirectional_mode not in MODES:
        raise ValueError(
            f"model.bidirectional_mode must be one of {', '.join(MODES)}, got {config.bidirectional_mode!r}"
        )
    if config.bidirectional_mode != MODES[0] and layers in (None, 0):
        raise ValueError(f"model.bidirectional_mode {config.bidirectional_mode} needs model.bidirectional_layers")
    if config.bidirectional_mode == "add" and layers == ALL:
        raise ValueError("model.bidirectional_mode add puts new layers on top: say how many, not 'all'")
    if config.load_in_4bit and train and not config.lora:
        raise ValueError("4-bit weights are not trained: give model.lora, or load_in_4bit false")
    if config.name == SCRATCH and (config.lora or config.load_in_4bit or config.bidirectional_mode == "add"):
        raise ValueError("lora, load_in_4bit and bidirectional_mode add are for a model that is there, not for scratch")


def _load(config: ModelConfig) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from sentence_transformers.util import is_sentence_transformer_model
    from transformers import BitsAndBytesConfig

    check_path(config.name)
    hub: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "revision": config.revision}
    changes: dict[str, Any] = {} if config.dropout is None else _dropout_keys(config, hub)
    changes |= _added_layers(config, hub)
    weights: dict[str, Any] = {"dtype": config.dtype, "attn_implementation": config.attention}
    weights = {key: value for key, value in weights.items() if value is not None}
    if config.load_in_4bit:
        if "num_hidden_layers" in changes:
            raise ValueError("new layers cannot be made in 4 bits: use mode modify, or load_in_4bit false")
        weights["quantization_config"] = BitsAndBytesConfig(**(_four_bit(config) or {}))
    if is_sentence_transformer_model(config.name, revision=config.revision):
        model = SentenceTransformer(
            config.name, device=config.device, config_kwargs=changes, model_kwargs=weights, **hub
        )
        if config.pooling is not None:
            places = [name for name, module in model.named_children() if isinstance(module, Pooling)]
            if len(places) != 1:
                raise ValueError(f"model.pooling cannot be changed: {config.name} has {len(places)} pooling modules")
            # Set the attribute, do not rebuild the container: modules keep their order and names.
            model._modules[places[0]] = Pooling(model._modules[places[0]].embedding_dimension, POOLING[config.pooling])
        return model
    transformer = Transformer(
        config.name, model_kwargs={**hub, **weights}, processor_kwargs=dict(hub), config_kwargs={**hub, **changes}
    )
    if transformer.tokenizer.pad_token is None:  # decoders often have none
        transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    return SentenceTransformer(modules=[transformer, _pooling(transformer, config.pooling)], device=config.device)


def _pooling(transformer: Any, pooling: str | None) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling

    if pooling is None:
        pooling = "cls" if transformer.model.config.model_type == "modernbert" else "mean"
    return Pooling(transformer.get_embedding_dimension(), POOLING[pooling])


def check_path(name: str) -> None:
    """FileNotFoundError for a name that can only be a path, and is no folder."""
    from pathlib import Path

    # A hub name is OWNER/NAME or NAME; all else that looks like a path is one.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"no such model directory: {name}")


def _base_config(config: ModelConfig, hub: dict[str, Any]) -> Any:
    from pathlib import Path

    from transformers import AutoConfig

    # Older SentenceTransformers keep the encoder in a sub-folder.
    inner = Path(config.name) / "0_Transformer"
    return AutoConfig.from_pretrained(str(inner) if inner.is_dir() else config.name, **hub)


def _dropout_keys(config: ModelConfig, hub: dict[str, Any]) -> dict[str, float]:
    found = _base_config(config, hub).to_dict()
    names = [name for name, value in found.items() if "dropout" in name and isinstance(value, (int, float))]
    if not names:
        raise ValueError(f"model.dropout: {config.name} has no dropout to set")
    return {name: config.dropout for name in names}  # type: ignore[misc]


def _added_layers(config: ModelConfig, hub: dict[str, Any]) -> dict[str, Any]:
    """Changes to a decoder's configuration that give it new layers on top, of the last one's kind."""
    from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig, check

    if config.bidirectional_mode != "add" or not config.bidirectional_layers:
        return {}
    base, new = _base_config(config, hub), int(config.bidirectional_layers)
    if isinstance(base, BidirectionalConfig):  # saved with them
        return {}
    check(base, 0, "add")
    changes: dict[str, Any] = {"num_hidden_layers": base.num_hidden_layers + new}
    kinds = getattr(base, "layer_types", None)
    return {**changes, "layer_types": [*kinds, *[kinds[-1]] * new]} if kinds else changes


def _four_bit(config: ModelConfig) -> dict[str, Any] | None:
    from raoe_train.encoders.adapters import four_bit

    return four_bit(config.dtype) if config.load_in_4bit else None


def _as_decoder(model: Any, config: ModelConfig, train: bool) -> None:
    """Put a BidirectionalModel in the place of a plain decoder where layers, an adapter or 4 bits ask for it.

    Also without bidirectional layers it is what saves an adapter together with the name of its base.
    """
    from raoe_train.encoders.bidirectional.configuration import ARCHITECTURES
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    layers, inner = config.bidirectional_layers, model[0].model
    if isinstance(inner, BidirectionalModel):
        there = inner.config
        wished = len(inner.decoder.layers) if layers == ALL else layers
        if wished is not None and (wished, config.bidirectional_mode) != (
            there.bidirectional_layers,
            there.bidirectional_mode,
        ):
            raise ValueError(
                f"{config.name} has {there.bidirectional_layers} bidirectional layers, mode "
                f"{there.bidirectional_mode}: leave model.bidirectional_layers out, or start from its base model"
            )
        if config.lora and train and not inner.has_adapter:
            there.base_model, there.base_revision = _base_name(config.name), config.revision
            there.base_quantization = _four_bit(config)
        _warn_of_last_token(model, there)
        return
    decoder = inner.config.model_type in ARCHITECTURES
    if config.load_in_4bit and not decoder:
        raise ValueError(f"model.load_in_4bit is for decoders of type {', '.join(ARCHITECTURES)}, not for "
                         f"{inner.config.model_type!r}")  # fmt: skip
    if layers is None and not (decoder and (config.load_in_4bit or (config.lora and train))):
        return
    depth = inner.config.num_hidden_layers
    model[0].model = BidirectionalModel.around(
        inner,
        depth if layers == ALL else layers or 0,
        config.bidirectional_mode,
        base_model=_base_name(config.name),
        base_revision=config.revision,
        base_quantization=_four_bit(config),
    )
    _warn_of_last_token(model, model[0].model.config)


def _add_adapter(inner: Any, lora: dict[str, Any]) -> None:
    from raoe_train.encoders.adapters import add_lora
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    if not isinstance(inner, BidirectionalModel):
        if lora:
            add_lora(inner, lora)
    elif lora or inner.has_adapter:
        new = len(inner.added_layers)
        last = [f"layers.{number}." for number in range(len(inner.decoder.layers))][len(inner.decoder.layers) - new :]
        add_lora(inner.decoder, lora, leave=last)


def _base_name(name: str) -> str:
    from pathlib import Path

    path = Path(name).expanduser()  # an adapter may be loaded from elsewhere
    return str(path.resolve()) if path.is_dir() else name


def _warn_of_last_token(model: Any, config: Any) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    last = any(isinstance(module, Pooling) and module.pooling_mode in ("lasttoken", ("lasttoken",)) for module in model)
    if last and config.bidirectional_layers == 1 and config.bidirectional_mode != "add":
        logger.warning(
            "one bidirectional layer and last-token pooling: embeddings are those of the causal model, since the last "
            "token saw all others anyway; pool the mean, or make two or more layers bidirectional"
        )


def _draw_weights(model: Any, seed: int) -> None:
    import torch
    from transformers import AutoModel

    old = model[0].model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = AutoModel.from_config(old.config)
    # A saved encoder may lack the pooler that a new one has; then the old one's parts decide.
    missing, _ = old.load_state_dict(new.state_dict(), strict=False)
    if missing:
        raise ValueError(f"model.random_weights cannot make weights for {', '.join(missing[:3])}")


def _check_positions(model: Any) -> None:
    limit = getattr(model[0].model.config, "max_position_embeddings", None)
    if limit is not None and model.max_seq_length is not None and model.max_seq_length > limit:
        raise ValueError(f"model.max_seq_length is {model.max_seq_length}, but the encoder has only {limit} positions")
