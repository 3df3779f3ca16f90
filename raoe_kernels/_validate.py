"""Argument checks shared by the ops. Every error message names the argument and shows its value."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
LARGEST = sys.float_info.max
_UNORDERED = (torch.uint64,)  # torch cannot sort uint64, and values of uint64 can exceed int64
# {argument name in other libraries and papers: our names}; errors suggest the first of our names that the function has
_SYNONYMS = {"temperature": ["scale"], "tau": ["scale"], "labels": ["targets", "scores"],
             "attention_mask": ["padding_mask"], "attn_mask": ["padding_mask"]}  # fmt: skip


def public(function: _Function) -> _Function:
    """Decorate a public function so that an error about an unknown keyword suggests the argument that was meant."""
    names = frozenset(signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if not names.issuperset(keywords):
            unknown = next(name for name in keywords if name not in names)
            synonyms = [name for name in _SYNONYMS.get(unknown, ()) if name in names]
            meant, *_ = *synonyms, *get_close_matches(unknown, names, 1), f"one of {', '.join(sorted(names))}"
            unit = ", the inverse of a temperature" if meant == "scale" else ""
            raise TypeError(f"{function.__name__} has no argument {unknown!r}: use {meant}{unit}")
        return function(*args, **keywords)

    return cast(_Function, call)


def describe(value: object) -> str:
    """Describe a value for an error message: tensors by dtype, shape and device, other values by repr."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def float_tensor(name: str, value: object, ndim: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {describe(value)}")
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {describe(value)}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {value.layout}: pass .to_dense()")
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, got {describe(value)}")


def companion(name: str, value: object, shape: tuple[int, ...], of: str, to: Tensor) -> Tensor:
    """Check that `value` is a tensor of shape `shape` on the device of the tensor `to`. In error messages, `of` is the
    name of the tensor `to`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {describe(value)}")
    if value.shape != shape or value.device != to.device:
        shape, device = tuple(shape), to.device
        raise ValueError(f"{name} must have shape {shape} and be on {of}'s device ({device}), got {describe(value)}")
    return value


def integers(name: str, value: object, shape: tuple[int, ...], of: str, to: Tensor) -> Tensor:
    """Check that a tensor has an integer dtype (not bool), and check its shape and device as `companion` does."""
    value = companion(name, value, shape, of, to)
    if value.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor with an integer dtype (up to int64, not bool), got {describe(value)}")
    integer_tensor(name, value)
    return value


def target(name: str, value: Tensor) -> Tensor:
    """Check that a tensor does not require grad."""
    if value.requires_grad:
        raise ValueError(f"{name} must not require grad (it is a target), got {describe(value)}: pass {name}.detach()")
    return value


def alike(names: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"{names} must have the same shape, dtype and device, got {describe(a)} and {describe(b)}")


def real_tensor(name: str, value: Tensor) -> None:
    if value.is_complex() or value.dtype in _UNORDERED or value.is_quantized:
        raise TypeError(f"{name} must contain real numbers (floats or integers up to int64), got {describe(value)}")


def bool_tensor(name: str, value: Tensor) -> None:
    if value.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {describe(value)}")


def integer_tensor(name: str, value: Tensor) -> None:
    if value.is_floating_point() or value.is_complex() or value.dtype in _UNORDERED or value.is_quantized:
        raise TypeError(f"{name} must be a tensor with an integer dtype (up to int64, not bool), got {describe(value)}")


def number(name: str, value: object, *, low: float = -LARGEST, strict: bool = False) -> float:
    """Check that a value is a finite Python or numpy number >= low (> low if strict), and return it as a float."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Python number, got {describe(value)}: pass {name}.item()")
    # Under torch.compile, a number may be symbolic: then, hasattr and math.isfinite cannot be traced.
    if isinstance(value, (bool, str)) or not (isinstance(value, (int, float)) or hasattr(value, "__float__")):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    result = float(value)
    if not low <= result <= LARGEST or (strict and result == low):
        bound = "" if low == -LARGEST else f" {'>' if strict else '>='} {low:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {describe(value)}")
    return result


def number_or_tensor(
    name: str, value: object, device: torch.device, *, low: float = -LARGEST, strict: bool = False
) -> float | Tensor:
    """Check that a value is a number in the allowed range, or a scalar float tensor on `device`, which may be
    learnable. The value of a tensor is checked only on a CPU in eager mode, because reading it from a GPU would make
    the host wait, and compiled code cannot branch on it."""
    if not isinstance(value, Tensor):
        return number(name, value, low=low, strict=strict)
    if not value.is_floating_point() or value.ndim != 0 or value.device != device:
        raise ValueError(f"{name} must be a number or a scalar float tensor on {device}, got {describe(value)}")
    if device.type == "cpu" and not torch.compiler.is_compiling():
        number(name, value.item(), low=low, strict=strict)
    return value


def scale(value: object) -> float:
    """Check that a `scale` is a number > 0. A value below 1 causes a warning, once per call site."""
    result = number("scale", value, low=0, strict=True)
    if not torch.compiler.is_compiling() and result < 1:
        warn_of_temperature(result)
    return result


def learnable_scale(value: object, device: torch.device) -> float | Tensor:
    """Check that `scale` is a number > 0 (a value below 1 causes a warning) or a scalar float tensor on `device`."""
    if isinstance(value, Tensor):
        return number_or_tensor("scale", value, device, low=0, strict=True)
    return scale(value)


def warn_of_temperature(scale: float) -> None:
    """Warn about a scale below 1. The warning points to the line in the caller's code, outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"scale={scale:g} looks like a temperature, but it multiplies similarities: pass 1/{scale:g} = {1 / scale:g}",
        stacklevel=level,
    )


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {describe(value)}")
    return value


def widths(name: str, value: object, columns: int) -> tuple[int, ...]:
    """Check that prefix widths are strictly increasing integers from 1 to `columns`, and return them as a tuple."""
    dims = tuple(value) if isinstance(value, (tuple, list)) else ()
    if not dims or not all(isinstance(width, int) and not isinstance(width, bool) for width in dims):
        kind = ValueError if isinstance(value, (tuple, list)) and not dims else TypeError
        raise kind(f"{name} must be a non-empty tuple or list of integers, got {describe(value)}")
    if not 0 < dims[0] <= dims[-1] <= columns or any(low >= high for low, high in pairwise(dims)):
        raise ValueError(f"{name} must be strictly increasing integers from 1 to {columns}, got {describe(value)}")
    return dims
