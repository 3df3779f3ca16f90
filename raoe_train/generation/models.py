"""Load language models and their tokenizers from a hub or a folder."""

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from raoe_train.encoders.preflight import check_device, four_bit, loading
from raoe_train.processes import from_environment
from raoe_train.settings import LanguageModel


def load_tokenizer(model: LanguageModel) -> Any:
    """Load the model's tokenizer."""
    if not model.name:
        raise ValueError("model.name is missing: set it to a language model, by path or hub name")
    with loading(model.name):
        return AutoTokenizer.from_pretrained(**_source(model))


def load_language_model(model: LanguageModel) -> Any:
    """Load a causal language model in eval mode on its device. ValueError if the files lack weights (such as those of
    the head), because these weights would be random."""
    device = model.device or default_device()
    check_device(device)
    weights: dict[str, Any] = {"dtype": model.dtype or "auto", "device_map": model.device_map or {"": device}}
    if model.attention is not None:
        weights["attn_implementation"] = model.attention
    if model.load_in_4bit:
        weights["quantization_config"] = BitsAndBytesConfig(**four_bit(model.dtype))
    with loading(model.name):
        result: Any = AutoModelForCausalLM.from_pretrained(output_loading_info=True, **weights, **_source(model))
    network, info = result
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{model.name} is not a complete language model: it lacks weights {', '.join(missing[:3])}")
    return network.eval()


def default_device() -> str:
    """Return the name of an accelerator if there is one, else cpu. With several GPUs, LOCAL_RANK selects the GPU."""
    if torch.cuda.is_available():
        return f"cuda:{from_environment('LOCAL_RANK', 0) % torch.cuda.device_count()}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _source(model: LanguageModel) -> dict[str, Any]:
    name, trusted = os.path.expanduser(model.name), model.trust_remote_code
    return {"pretrained_model_name_or_path": name, "trust_remote_code": trusted, "revision": model.revision}
