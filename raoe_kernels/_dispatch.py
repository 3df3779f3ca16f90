"""Select the backend for a call, and explain why a backend is unavailable.

A backend can be requested in three ways. In order of precedence, these are the call's argument `backend`, the innermost
`use_backend` block, and the environment variable RAOE_KERNELS_BACKEND, which is read only once. If no backend is
requested, the call runs on the first available backend in AUTO. If a requested backend cannot run, a RuntimeError
states why, and no other backend is tried.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from . import _validate

NAMES = ("reference", "scan", "triton", "native")
AUTO = {"cuda": ("native", "triton", "scan"), "cpu": ("native", "scan")}
ENVIRONMENT = "RAOE_KERNELS_BACKEND"
OF_BUILDS = ("RAOE_KERNELS_BUILD", "RAOE_KERNELS_CACHE", "RAOE_KERNELS_CUDA_ARCHS", "RAOE_KERNELS_WERROR")


@cache
def _environment() -> str:
    """Return the backend that RAOE_KERNELS_BACKEND requests, or "auto". The result is cached, because reading the
    variable takes as long as the rest of the selection. An unknown variable with a similar name causes a warning."""
    ours = [name for name in os.environ if name.startswith(("RAOE_KERNEL", "RAOE_BACKEND"))]
    if unknown := sorted({*ours} - {ENVIRONMENT, *OF_BUILDS}):
        warnings.warn(f"environment variable {unknown[0]} has no effect: did you mean {ENVIRONMENT}?", stacklevel=4)
    return _validate.one_of(ENVIRONMENT, os.environ.get(ENVIRONMENT) or "auto", ("auto", *NAMES))


_block: ContextVar[str | None] = ContextVar("raoe_kernels_backend", default=None)


@dataclass(frozen=True)
class Backend:
    """A backend of an op: the name of its module, and a function missing(device) that returns why the backend cannot
    run on the device, or None if it can."""

    module: str
    missing: Callable[[torch.device], str | None] = lambda device: None


def backends(package: str, **missing: Callable[[torch.device], str | None]) -> dict[str, Backend]:
    """Return the backends in an op's folder: "reference" and "scan", which run on every device, and the backends that
    are passed as keyword arguments ("triton" or "native"). The value of each keyword argument is the function `missing`
    of that backend."""
    files = {"triton": "triton_kernels", "native": "native"}
    plain = {name: Backend(f"{package}.{name}") for name in ("reference", "scan")}
    return plain | {name: Backend(f"{package}.{files[name]}", reason) for name, reason in missing.items()}


@dataclass
class Op:
    """An op: its name in messages (`key`), its public functions, and its backends by name.

    `by_case` refines "auto" on CUDA: if Triton is the first available backend, by_case(problem) returns the name of the
    backend that runs the call.
    """

    key: str
    functions: tuple[str, ...]
    backends: Mapping[str, Backend]
    by_case: Callable[[Any], str] | None = None
    _chosen: dict[tuple[str, torch.device], ModuleType] = field(default_factory=dict, repr=False)

    def available(self, device: torch.device) -> dict[str, bool | str]:
        """Return {backend name: True, or the reason why this backend cannot run on `device`}."""
        return {name: self._missing(name, device) or True for name in NAMES}

    def select(self, device: torch.device, backend: str = "auto", problem: Any = None) -> ModuleType:
        """Return the module of the backend that runs a call on `device`."""
        name = self.wish(backend)
        module = self._chosen.get((name, device))  # by device: the GPUs in a machine can differ
        if module is None:
            module = self._chosen[name, device] = self._resolve(name, device)
        if device.type == "cuda" and name == "auto" and self.by_case is not None:
            if module.__name__ == self.backends["triton"].module:
                return self.select(device, self.by_case(problem), problem)
        return module

    def _missing(self, name: str, device: torch.device) -> str | None:
        entry = self.backends.get(name)
        return f"{self.key} has no {name} backend" if entry is None else entry.missing(device)

    def wish(self, backend: str) -> str:
        """Return the backend that the call, a use_backend block or the environment variable requests, or "auto" if none
        of them requests a backend."""
        if backend != "auto":
            return _validate.one_of("backend", backend, ("auto", *NAMES))
        requested = _block.get() or _environment()
        # The block or variable applies to every op, so an op that lacks the requested backend ignores the request.
        return requested if requested in self.backends else "auto"

    def _resolve(self, name: str, device: torch.device) -> ModuleType:
        if name == "auto":
            order = AUTO.get(device.type, ("scan",))
            name = next(n for n in order if self._missing(n, device) is None)
        reason = self._missing(name, device)
        if reason is not None:
            raise RuntimeError(f"backend {name!r} cannot run {self.key} on {device}: {reason}")
        return import_module(self.backends[name].module)


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every op in this block with `backend`: "auto", "reference", "scan", "triton" or "native".

    An op that lacks the requested backend ignores the block. If an op has the backend but cannot run it on the call's
    device, it raises RuntimeError with the reason. An explicit `backend=` argument takes precedence over the block.
    """
    token = _block.set(_validate.one_of("backend", backend, ("auto", *NAMES)))
    try:
        yield
    finally:
        _block.reset(token)


def refuse_func_grad(function: str) -> None:
    """Raise RuntimeError if the call runs under torch.func.grad or torch.func.vjp, which the ops do not support."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    levels = torch._C._functorch.get_interpreter_stack() or []
    if any(level.key() == torch._C._functorch.TransformType.Grad for level in levels):
        raise RuntimeError(f"{function} does not work under torch.func.grad: use torch.autograd.grad or .backward()")


def refuse_second_derivative(function: str) -> None:
    """Raise RuntimeError if the backward pass runs with create_graph=True, for functions without a second
    derivative."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{function} does not support second derivatives: differentiate without create_graph=True")


def triton_missing(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on `device`, or None if they can. On a CPU, Triton needs its interpreter."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "triton is not installed (torch's CUDA builds include it)"
    if device.type == "cuda":
        version = import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) < (3, 4):
            return f"the kernels need Triton 3.4 or newer, but Triton {version} is installed"
        if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
            return f"Triton kernels need compute capability >= 8.0, but this GPU has {capability[0]}.{capability[1]}"
        return None
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
        return None if interpreted else "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, for tests)"
    return f"there are no Triton kernels for {device.type} devices"
