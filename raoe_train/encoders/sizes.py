"""What an encoder would take of a device's memory, by its config and without weights."""

from __future__ import annotations

import os
from typing import Any

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.encoders.bidirectional import register
from raoe_train.encoders.load import check_path, loading, new_layers, transformer_of
from raoe_train.encoders.settings import SCRATCH, Encoder, Model

GB = 1e9
HALF = ("bfloat16", "float16")


def config_of(encoder: Encoder) -> Any:
    """transformers' config of an encoder; OSError where there is none."""
    from transformers import AutoConfig

    register()
    check_path(str(encoder.name))
    asked = {"revision": encoder.revision, "trust_remote_code": encoder.trust_remote_code}
    with loading(str(encoder.name)):
        return AutoConfig.from_pretrained(transformer_of(str(encoder.name)), **asked)


def sizes(model: Model) -> tuple[Any, int, int, int]:
    """(config of an encoder, its weights, those of them that are trained, those outside its embeddings), on the meta
    device. OSError where there is no config."""
    import torch
    from transformers import AutoModel

    from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig

    config = config_of(model)
    changes = new_layers(config, model)
    if isinstance(config, BidirectionalConfig):
        config = config.text_config
    depth = config.num_hidden_layers
    config.update(changes)
    with torch.device("meta"):
        encoder = AutoModel.from_config(config, trust_remote_code=model.trust_remote_code)
    parameters = trained = sum(weight.numel() for weight in encoder.parameters())
    if model.lora:
        fresh = tuple(f"layers.{number}." for number in range(depth, config.num_hidden_layers))
        wanted, rank = model.lora.get("target_modules", "all-linear"), int(model.lora.get("r", 8))
        linear = {name: part for name, part in encoder.named_modules() if isinstance(part, torch.nn.Linear)}
        taken = [part for name, part in linear.items() if wanted == "all-linear" or name.split(".")[-1] in wanted]
        trained = sum(rank * (part.in_features + part.out_features) for part in taken)
        trained += sum(weight.numel() for name, weight in encoder.named_parameters() if name.startswith(fresh))
    tables = [part for part in encoder.modules() if isinstance(part, torch.nn.Embedding)]
    return config, parameters, trained, parameters - sum(part.weight.numel() for part in tables)


def held(model: Model, config: Any, parameters: int, trained: int) -> dict[str, float]:
    """GB of an encoder's weights, and of what is kept beside those that are trained."""
    saved = str(getattr(config, "dtype", None)).removeprefix("torch.")
    bytes_each = 0.5 if model.load_in_4bit else 2 if (model.dtype or saved) in HALF else 4
    return {"weights": parameters * bytes_each / GB, "gradients and optimizer": 12 * trained / GB}


def check_fits(model: Model, train: bool = True) -> None:
    """ValueError where what `held` says of a model, to be trained or as it is, is more than the memory of its device:
    before it is loaded. What has no plain config is not looked at, nor what several devices share."""
    import torch

    if model.name == SCRATCH or model.device_map is not None or rank_and_world()[1] > 1:
        return
    try:
        config, parameters, trained, _ = sizes(model)
    except (OSError, ValueError, KeyError, AttributeError, ImportError):  # the loader says what is wrong, if it is
        return
    kind = torch.device(model.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if kind.type not in ("cuda", "cpu"):
        return
    has = device_memory(kind) / GB
    if (needed := sum(held(model, config, parameters, trained if train else 0).values())) > has:
        what, less = "its weights", "model.load_in_4bit makes them small"
        if train:
            what, less = f"{what}, gradients and Adam's moments", f"model.lora trains fewer, {less}"
        raise ValueError(
            f"model.name {model.name} does not fit: {what} take {needed:.1f} GB by arithmetic, and the {kind.type} has "
            f"{has:.1f}; {less}"
        )


def device_memory(device: Any) -> int:
    """Bytes of all memory of a GPU, or of this machine."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
