"""Language models and their tokenizers, from a hub or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from raoe_train.artifacts.processes import local_rank
from raoe_train.encoders.load import DTYPES as ENCODER_DTYPES
from raoe_train.encoders.load import check_path

if TYPE_CHECKING:
    from raoe_train.config import LanguageModelConfig

DTYPES = (*ENCODER_DTYPES, "float64")


def load_tokenizer(config: LanguageModelConfig) -> Any:
    """transformers' tokenizer of the model; ValueError without a name, FileNotFoundError for a folder that is not."""
    from transformers import AutoTokenizer

    if not config.name:
        raise ValueError("model.name is missing: the language model, by name or path")
    if config.dtype is not None and config.dtype not in DTYPES:
        raise ValueError(f"model.dtype must be one of {', '.join(DTYPES)}, got {config.dtype!r}")
    check_path(config.name)
    return AutoTokenizer.from_pretrained(_name(config), **_hub(config))


def load_language_model(config: LanguageModelConfig) -> Any:
    """The causal language model, in eval mode, on its device (by default a GPU where there is one; of several, the one
    of this process's local rank).

    Raises:
        ValueError: weights without a head for a language model: what comes out would be random.
    """
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    weights: dict[str, Any] = {"dtype": config.dtype or "auto", "attn_implementation": config.attention}
    device = config.device or _device()
    if config.load_in_4bit:
        from raoe_train.encoders.adapters import four_bit

        weights["quantization_config"] = BitsAndBytesConfig(**four_bit(config.dtype))
        weights["device_map"] = {"": torch.device(device)}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        _name(config),
        output_loading_info=True,
        **{key: value for key, value in weights.items() if value is not None},
        **_hub(config),
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{config.name} is not a whole language model; it has no {', '.join(missing[:3])}")
    return (model if config.load_in_4bit else model.to(device)).eval()


def _name(config: LanguageModelConfig) -> str:
    path = Path(config.name).expanduser()
    return str(path) if path.is_dir() else config.name


def _hub(config: LanguageModelConfig) -> dict[str, Any]:
    return {"trust_remote_code": config.trust_remote_code, "revision": config.revision}


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"cuda:{local_rank() % torch.cuda.device_count()}"
    return "mps" if torch.backends.mps.is_available() else "cpu"
