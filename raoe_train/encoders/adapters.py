"""LoRA and QLoRA: peft's adapters in a model, and bitsandbytes' 4-bit weights under them."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

# QLoRA's weights (Dettmers et al., 2023): NF4, the constants of its blocks quantised once more.
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def four_bit(compute_dtype: str | None) -> dict[str, Any]:
    """Keys of transformers.BitsAndBytesConfig; products in `compute_dtype`, by default bfloat16 on a GPU."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "model.load_in_4bit needs bitsandbytes: pip install bitsandbytes, or train with LoRA on full weights "
            "(model.load_in_4bit false)"
        )
    fits = "bfloat16" if torch.cuda.is_available() else "float32"
    return {**FOUR_BIT, "bnb_4bit_compute_dtype": compute_dtype or fits}


def add_lora(model: Any, settings: Mapping[str, Any], leave: Sequence[str] = ()) -> None:
    """Freeze a transformers model and train a LoRA adapter in it, in float32; one that is there already is trained on.

    Args:
        settings: keys of peft.LoraConfig; all linear layers have an adapter unless target_modules says which.
        leave: beginnings of names of modules that get no adapter and are trained themselves.
    """
    from peft import LoraConfig, TaskType, prepare_model_for_kbit_training

    if unknown := sorted(set(settings) - {field.name for field in fields(LoraConfig) if field.init}):
        raise ValueError(f"unknown key model.lora.{unknown[0]}: it takes the keys of peft.LoraConfig")
    defaults = {"target_modules": "all-linear", "task_type": TaskType.FEATURE_EXTRACTION}
    config = LoraConfig(**{**defaults, **settings})
    if getattr(model, "_hf_peft_config_loaded", False):
        (there,) = model.peft_config.values()
        changed = [key for key in settings if getattr(there, key) != getattr(config, key) and key != "target_modules"]
        if changed:
            raise ValueError(
                f"the model has a LoRA adapter with another {', '.join(changed)}: leave model.lora as it was, or make "
                "plain weights of it first with raoe-train export --merge"
            )
    else:
        if getattr(model, "is_loaded_in_4bit", False):  # this makes float32 of the norms and embeddings, too
            prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        else:
            model.requires_grad_(False)
        if leave:
            config.exclude_modules = f"({'|'.join(map(re.escape, leave))}).*"
        model.add_adapter(config)
    for name, parameter in model.named_parameters():
        if "lora_" in name or name.startswith(tuple(leave)):
            parameter.requires_grad_(True)
            parameter.data = parameter.data.to(torch.float32)
