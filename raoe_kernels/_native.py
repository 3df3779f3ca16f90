"""Finds the compiled modules on first use and keeps the reason where one cannot be had."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from ._build import why_missing

# The codes of csrc/types.h.
FLOATS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


@cache
def _load(kind: str) -> ModuleType | str:
    """The compiled module for "cpu" or "cuda", or why there is none."""
    try:
        return import_module(f"._native_{kind}", __package__)
    except ImportError as error:
        return why_missing(kind, error)


def missing(device: torch.device) -> str | None:
    """Why the compiled kernels cannot run on `device`, None if they can."""
    if device.type not in ("cpu", "cuda"):
        return f"no compiled kernels are written for {device.type} devices"
    if device.type == "cuda" and torch.version.hip:
        return "the compiled kernels are CUDA, this torch is built for ROCm"
    module = _load(device.type)
    return module if isinstance(module, str) else None


def module(kind: str) -> ModuleType:
    """The compiled module for a device type, which `missing` has passed."""
    loaded = _load(kind)
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded
