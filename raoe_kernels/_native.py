"""Load the compiled modules on first use. If a module cannot be loaded, remember the reason."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ._build import why_missing

# Codes by which the compiled modules identify dtypes, as in csrc/types.h.
FLOATS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


@cache
def _load(kind: str) -> ModuleType | str:
    """Return the compiled module for "cpu" or "cuda", or the reason why it cannot be loaded."""
    try:
        return import_module(f"._native_{kind}", __package__)
    except ImportError as error:
        return why_missing(kind, error)


def missing(device: torch.device) -> str | None:
    """Return why the compiled kernels cannot run on `device`, or None if they can."""
    if device.type not in ("cpu", "cuda"):
        return f"there are no compiled kernels for {device.type} devices"
    if device.type == "cuda" and torch.version.hip:
        return "the compiled kernels need CUDA, but this torch is built for ROCm"
    loaded = _load(device.type)
    if isinstance(loaded, str):
        return loaded
    if device.type == "cpu":
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return _unusable(torch.cuda.current_device() if device.index is None else device.index)


def missing_beyond_cpu(device: torch.device) -> str | None:
    """Return why the compiled kernels of a CPU-only op cannot run on `device`, or None if they can."""
    return missing(device) if device.type == "cpu" else "its compiled kernels run only on a CPU"


@cache
def _unusable(index: int) -> str | None:
    """Return why GPU `index` or its driver cannot run the CUDA module, or None if they can."""
    with torch.cuda.device(index):
        reason = module("cuda").unusable()
    name = torch.cuda.get_device_name(index)
    return f"the compiled CUDA kernels do not run on {name}: {reason}" if reason else None


def address(x: Tensor | None) -> int:
    """Return the address of a tensor's first element, or 0 for None."""
    if x is None:
        return 0
    try:
        pointer = x.data_ptr()
    except RuntimeError:
        kinds = "tensors without memory, such as those created by is_grads_batched=True or jacobian(vectorize=True)"
        raise RuntimeError(f"the compiled kernels cannot read {kinds}: use backend='scan'") from None
    if not pointer and x.numel():
        raise RuntimeError(f"a tensor of shape {tuple(x.shape)} has no memory: its storage was freed")
    return pointer


def module(kind: str) -> ModuleType:
    """Return the compiled module for a device type. Raise RuntimeError if the module is missing."""
    loaded = _load(kind)
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded
