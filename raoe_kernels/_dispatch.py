"""Which backend takes a call, and why another one does not.

Order of precedence: the call's `backend=`, the innermost `use_backend` block, the environment variable
RAOE_KERNELS_BACKEND (read here and nowhere else, once), then the first available of AUTO for the device. A backend that
was asked for by name never falls back: it serves or it raises RuntimeError with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from . import _validate

NAMES = ("reference", "scan", "triton", "native")
AUTO = {"cuda": ("native", "triton", "scan"), "cpu": ("native", "scan")}
ENVIRONMENT = "RAOE_KERNELS_BACKEND"


@cache
def _environment() -> str:
    """The process's wish, read when first needed: reading it costs as much as choosing."""
    return _validate.one_of(ENVIRONMENT, os.environ.get(ENVIRONMENT) or "auto", ("auto", *NAMES))


_block: ContextVar[str | None] = ContextVar("raoe_kernels_backend", default=None)


@dataclass(frozen=True)
class Backend:
    """One op's implementation: the module that holds its functions, and who says why it cannot serve a device."""

    module: str
    missing: Callable[[torch.device], str | None] = lambda device: None


@dataclass
class Op:
    """An op's backends by name; `functions` are the public names that run on it.

    by_case: device type -> the module that auto runs there in place of Triton's, one that chooses call by call
    """

    key: str
    functions: tuple[str, ...]
    backends: Mapping[str, Backend]
    by_case: Mapping[str, str] = field(default_factory=dict)
    _chosen: dict[tuple[str, torch.device], ModuleType] = field(default_factory=dict, repr=False)

    def available(self, device: torch.device) -> dict[str, bool | str]:
        """Per backend name: True, or why it is not there for `device`."""
        return {name: self._missing(name, device) or True for name in NAMES}

    def select(self, device: torch.device, backend: str = "auto") -> ModuleType:
        """The module that serves a call on `device`."""
        name = self.wish(backend)
        module = self._chosen.get((name, device))  # GPUs of one machine can differ
        if module is None:
            module = self._chosen[name, device] = self._resolve(name, device)
        return module

    def _missing(self, name: str, device: torch.device) -> str | None:
        entry = self.backends.get(name)
        return f"{self.key} has no {name} backend" if entry is None else entry.missing(device)

    def wish(self, backend: str) -> str:
        """The name that was asked for, by the call, a block or the environment; "auto" for none."""
        if backend != "auto":
            return _validate.one_of("backend", backend, ("auto", *NAMES))
        wish = _block.get() or _environment()
        # A block is about everything inside it: an op that never had such a backend is exempt.
        return wish if wish in self.backends else "auto"

    def _resolve(self, name: str, device: torch.device) -> ModuleType:
        if name == "auto":
            order = AUTO.get(device.type, ("scan",))
            name = next(n for n in order if self._missing(n, device) is None)
            if name == "triton" and device.type in self.by_case:
                return import_module(self.by_case[device.type])
        reason = self._missing(name, device)
        if reason is not None:
            raise RuntimeError(f"backend {name!r} cannot run {self.key} on {device}: {reason}")
        return import_module(self.backends[name].module)


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every op inside the block on `backend` ("auto", "reference", "scan", "triton", "native").

    Ops that have no backend of that name at all choose as if there were no block; an op that has it but cannot run it
    here raises RuntimeError with the reason. An explicit `backend=` argument wins over the block.
    """
    token = _block.set(_validate.one_of("backend", backend, ("auto", *NAMES)))
    try:
        yield
    finally:
        _block.reset(token)


def refuse_second_derivative(function: str) -> None:
    """For the backward of a function whose gradient is not differentiable itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{function} has no second derivative: it was differentiated with create_graph=True")


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, None if they can (on a CPU: only in Triton's interpreter)."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "triton is not installed (it comes with torch's CUDA builds)"
    if device.type == "cuda":
        version = import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) < (3, 4):
            return f"Triton {version} is older than 3.4, which the kernels need"
        if torch.cuda.is_available() and (found := torch.cuda.get_device_capability(device)) < (8, 0):
            return f"Triton kernels need compute capability 8.0, and this GPU has {found[0]}.{found[1]}"
        return None
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
        return None if interpreted else "Triton kernels need a CUDA device (or TRITON_INTERPRET=1, for tests)"
    return f"Triton kernels are not written for {device.type} devices"
