"""LoRA and QLoRA: peft's adapters on an encoder, and bitsandbytes' 4-bit weights under them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# QLoRA's weights (Dettmers et al., 2023): NF4, the constants of its blocks quantised once more.
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def four_bit(compute_dtype: str | None) -> dict[str, Any]:
    """Keys of transformers.BitsAndBytesConfig; products in `compute_dtype`, by default bfloat16 on a GPU."""
    import importlib.util

    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "model.load_in_4bit needs bitsandbytes: pip install bitsandbytes, or train with LoRA on full weights "
            "(model.load_in_4bit false)"
        )
    fits = "bfloat16" if torch.cuda.is_available() else "float32"
    return {**FOUR_BIT, "bnb_4bit_compute_dtype": compute_dtype or fits}


def lora_config(settings: Mapping[str, Any]) -> Any:
    """peft's LoraConfig of a recipe's model.lora; all linear layers unless target_modules says which."""
    import dataclasses

    from peft import LoraConfig, TaskType

    known = {field.name for field in dataclasses.fields(LoraConfig) if field.init}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"unknown key model.lora.{unknown[0]}: it takes the keys of peft.LoraConfig")
    defaults = {"target_modules": "all-linear", "task_type": TaskType.FEATURE_EXTRACTION}
    return LoraConfig(**{**defaults, **settings})


def add_lora(model: Any, settings: Mapping[str, Any], leave: Sequence[str] = ()) -> None:
    """Freeze `model`, a transformers model, and put a LoRA adapter in it, in float32. One that is there already goes on
    being trained. Modules whose names start with one of `leave` get no adapter and are trained themselves."""
    import torch
    from peft import prepare_model_for_kbit_training

    config = lora_config(settings)
    if getattr(model, "_hf_peft_config_loaded", False):
        (there,) = model.peft_config.values()
        changed = [key for key in settings if getattr(there, key) != getattr(config, key) and key != "target_modules"]
        if changed:
            raise ValueError(
                f"the model has a LoRA adapter with another {', '.join(changed)}: leave model.lora as it was, or make "
                "plain weights of it first with raoe-train export --merge"
            )
    else:
        # It freezes all there is and, under 4-bit weights, makes float32 of the norms and embeddings.
        if getattr(model, "is_loaded_in_4bit", False):
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
