"""Ops as torch.library operators. torch.compile and tracers record each operator as a single call. The backend is
selected when the recorded call runs. Eager calls bypass the operators, whose overhead is larger than a kernel's run
time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._dispatch import Op

# A copy of this package may be loaded in the same process under another name. The operators of this copy need another
# namespace.
PACKAGE = str(__package__)
NAMESPACE = PACKAGE if PACKAGE == "raoe_kernels" else "raoe_kernels_" + re.sub(r"\W", "_", PACKAGE)
Results = Iterable[Tensor | None]


def eager(op: Op, backend: str, tensors: Sequence[Tensor | None], problem: Any) -> ModuleType | None:
    """Return the backend module that runs a call directly, or None if the torch.library operator must run the call.

    The operator is needed under torch.compile, for tensors whose memory a kernel cannot read, and for torch.jit.trace
    and make_fx, which record only torch operations. The call runs on the device of tensors[0]. Kernels have no
    forward-mode derivative. So if an input has a forward-mode tangent, "auto" selects "scan", and a request for a
    kernel backend raises an error.
    """
    if torch.compiler.is_compiling():
        return None
    device = tensors[0].device  # type: ignore[union-attr]
    module, forward_mode = op.select(device, backend, problem), forward_ad._current_level >= 0
    if not forward_mode and _reads_memory(tensors):
        return module
    if module.__name__.endswith((".scan", ".reference")):
        is_traced = _mode_traces() or any(hasattr(x, "fake_mode") for x in tensors)  # plain torch may read values, too
        return None if is_traced and not forward_mode else module
    if forward_mode and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors if x is not None):
        if op.wish(backend) == "auto":
            return op.select(device, "scan", problem)
        raise RuntimeError(
            f"backend {op.wish(backend)!r} does not support forward-mode derivatives of {op.key}: "
            'use backend="scan" with tensors that do not require grad'
        )
    return module if _reads_memory(tensors) else None


def savable(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return tensors that autograd can save for the backward pass: tensors created in inference mode are copied."""
    return [x if x is None or x.requires_grad or not x.is_inference() else x.clone() for x in tensors]


def _reads_memory(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a kernel may read the tensors' memory directly. This requires that no transform, trace or tracing
    mode is active. No tensor may be an instance of a Tensor subclass other than Parameter, lazily negated (torch's
    negative bit), or a zero tensor without memory."""
    active_keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    if active_keys not in _thread_keys(False) and (active_keys not in _thread_keys(True) or _mode_traces()):
        return False
    for x in tensors:
        if x is not None and (type(x) not in _MEMORY or x.is_neg() or x._is_zerotensor()):
            return False
    return True


_MEMORY = (Tensor, torch.nn.Parameter)


@cache
def _thread_keys(modes: bool) -> tuple[int, int]:
    """Return the dispatch keys that are active in a plain call, as two bit masks: one for calls outside inference_mode,
    and one for calls inside it. `modes` is True if a dispatch mode is active."""
    names = ["BackendSelect", "ADInplaceOrView", *["Python", "PythonTLSSnapshot"] * modes]
    bits = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names]
    return sum(bits), sum(bits) - bits[1]


def _mode_traces() -> bool:
    """Return whether an active dispatch mode traces calls or replaces tensors. Other modes only observe calls."""
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) for kind in (kinds.PROXY, kinds.FAKE, kinds.FUNCTIONAL))


def operator(
    name: str,
    arguments: str,
    results: int,
    run: Callable[..., Results],
    shapes: Callable[..., Results],
    autograd: tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]] | None = None,
) -> Callable[..., Any]:
    """Register and return an operator that takes `arguments` (in torch's schema notation) and the name of a backend.

    torch.compile recompiles for every new value of a float argument, but not for new values of a tensor. So if a float
    is symbolic, the returned function passes all floats as the tensor `numbers`, the operator's last argument. Constant
    floats stay floats, because CUDA graphs reject CPU tensors.

    Args:
        run: function(*arguments, backend) that returns as many tensors as `results` says, with None for an empty
            tensor.
        shapes: function(*arguments) that returns tensors with the shapes and dtypes of the results, or None like `run`.
        autograd: (setup_context, backward) for torch.library.register_autograd.
    """
    floats = [i for i, argument in enumerate(arguments.split(", ")) if argument.startswith("float ")]

    def kernel(*inputs):
        *values, numbers = inputs
        for i, number in zip(floats, () if numbers is None else numbers.tolist(), strict=False):
            values[i] = number
        results = _own_memory(_without_none(run(*values), inputs[0]))
        return results if len(results) > 1 else results[0]

    def fake(*inputs):
        results = tuple(x.new_empty(x.shape) for x in _without_none(shapes(*inputs[:-2]), inputs[0]))
        return results if len(results) > 1 else results[0]

    qualified = f"{NAMESPACE}::{name}"
    returns = ", ".join(["Tensor"] * results)
    torch.library.define(qualified, f"({arguments}, str backend, Tensor? numbers) -> ({returns})")
    torch.library.impl(qualified, "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(qualified, fake)
    if autograd:
        torch.library.register_autograd(qualified, autograd[1], setup_context=autograd[0])
    registered = getattr(getattr(torch.ops, NAMESPACE), name)

    def call(*inputs, numbers=None):
        if numbers is None and any(inputs[i].__class__ is not float for i in floats):
            one = torch.ones((), dtype=torch.float64, device="cpu")  # under torch.compile, such a product is a tensor
            numbers = torch.stack([one * inputs[i] for i in floats])
            inputs = tuple(0.0 if i in floats else x for i, x in enumerate(inputs))
        return registered(*inputs, numbers)

    return call


def like(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """For each input whose entry in `needs` is True, return an uninitialized tensor of the input's shape and dtype. For
    all other inputs, return None."""
    pairs = zip(inputs, needs, strict=True)
    return tuple([x.new_empty(x.shape) if need and x is not None else None for x, need in pairs])


def _without_none(results: Iterable[Tensor | None], like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if x is None else x for x in results]


def _own_memory(results: list[Tensor]) -> tuple[Tensor, ...]:
    """Give each result its own memory, as torch requires of operators. A backend's results may share one buffer."""
    seen: set[int] = set()
    for i, x in enumerate(results):
        x = x.contiguous()
        start = x.untyped_storage().data_ptr()
        results[i] = x.clone() if start in seen else x
        seen.add(start)
    return tuple(results)
