"""Check a model's device and its folder or hub name before loading the model, and define the 4-bit settings."""

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# quantization as in QLoRA (Dettmers et al., 2023): NF4 with double quantization
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def check_device(device: str | None) -> None:
    """Raise ValueError for a device that torch cannot use on this machine."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"model.device {device!r} cannot be used on this machine: {reason}") from None


def four_bit(compute_dtype: str | None) -> dict[str, Any]:
    """Return arguments for BitsAndBytesConfig. By default, compute_dtype is bfloat16 on a GPU and float32 on a CPU."""
    default = "bfloat16" if torch.cuda.is_available() else "float32"
    return {**FOUR_BIT, "bnb_4bit_compute_dtype": compute_dtype or default}


@contextmanager
def without_reports() -> Iterator[None]:
    """Context manager that hides transformers' reports about weights that encoders do not use (a decoder's head or a
    pooler). All other weights are checked by raoe itself."""
    loggers = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "integrations.peft")]
    for logger in loggers:
        logger.addFilter(_is_needed)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_needed)


def _is_needed(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "LOAD REPORT" not in message or bool(re.search(r"^(?=.*\|)(?!.*pooler\.).*MISSING", message, re.M))


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Context manager that replaces model loading errors with a one-sentence error that names the model."""
    # A hub name is OWNER/NAME or NAME. A longer name, or a name that starts with . / ~, is a path.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"no such model directory: {name}")
    try:
        with without_reports():
            yield
    except (ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries raise errors of many classes for a damaged folder
        if "raoe_train" in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise  # raoe's own message already names the model
        kind = OSError if isinstance(error, OSError) else ValueError
        reason = " ".join(str(error).split())
        if "ignore_mismatched_sizes" in reason:  # transformers' wording
            reason = ("the weight shapes do not match the model. If you added tokens before training an adapter, "
                      "save the base model with these tokens, and train the adapter on the saved model")  # fmt: skip
        elif not isinstance(error, (OSError, ValueError)):
            reason = f"its files may be damaged ({type(error).__name__}: {reason[:200]})"
        raise kind(f"{name} cannot be loaded: {reason}") from error
