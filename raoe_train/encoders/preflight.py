"""What is known of a model before its weights are loaded: folder, device, 4 bits, new layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from raoe_train.encoders.settings import Encoder, Model

# QLoRA's weights (Dettmers et al., 2023): NF4, the constants of its blocks quantised once more.
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def check_device(device: str | None) -> None:
    """ValueError for a device that is not here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"model.device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def four_bit(compute_dtype: str | None) -> dict[str, Any]:
    """Keys of transformers.BitsAndBytesConfig; products in `compute_dtype`, by default bfloat16 on a GPU."""
    fits = "bfloat16" if torch.cuda.is_available() else "float32"
    return {**FOUR_BIT, "bnb_4bit_compute_dtype": compute_dtype or fits}


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Errors of a hub or a folder become one sentence that names the model."""
    # A hub name is OWNER/NAME or NAME; all else that looks like a path is one.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"no such model directory: {name}")
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are damaged, or cut off: {error}") from None
    except OSError as error:
        raise OSError(f"{name} cannot be loaded: {' '.join(str(error).split())}") from error
    except (ValueError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged folder has many ways to fail in the libraries
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} cannot be loaded, its files do not fit ({type(error).__name__}: {said})") from error


def full_name(name: str) -> str:
    """A folder, or what sentence-transformers takes a name without an owner for."""
    from sentence_transformers.util import ORIGINAL_TRANSFORMER_MODELS

    if (folder := Path(name).expanduser()).is_dir():
        return str(folder)
    owned = "/" in name or name.lower() in ORIGINAL_TRANSFORMER_MODELS
    return name if owned else f"sentence-transformers/{name}"


def from_hub(encoder: Encoder) -> dict[str, Any]:
    """Arguments of transformers' from_pretrained for an encoder's config and tokenizer."""
    inner = Path(full := full_name(str(encoder.name))) / "0_Transformer"  # where older SentenceTransformers keep them
    place = str(inner) if inner.is_dir() else full
    revision, trusted = encoder.revision, encoder.trust_remote_code
    return {"pretrained_model_name_or_path": place, "revision": revision, "trust_remote_code": trusted}


def new_layers(base: Any, model: Model) -> dict[str, Any]:
    """Changes to a decoder's config by mode "add": layers on top, of the last one's kind."""
    from raoe_train.encoders.bidirectional.configuration import BidirectionalConfig, check

    if not model.added_layers or isinstance(base, BidirectionalConfig):  # which was saved with them
        return {}
    check(base, 0)
    changes: dict[str, Any] = {"num_hidden_layers": base.num_hidden_layers + model.added_layers}
    if kinds := getattr(base, "layer_types", None):
        changes["layer_types"] = [*kinds, *[kinds[-1]] * model.added_layers]
    return changes


def last_layers(depth: int, count: int) -> tuple[str, ...]:
    """How the names of the weights of a decoder's last `count` layers begin."""
    return tuple(f"layers.{number}." for number in range(depth - count, depth))
