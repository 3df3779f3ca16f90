"""Ops as opaque operators of torch.library, for torch.compile and whatever else is no call on plain memory: what traces
finds one call, and the backend is looked up when that runs. Eager calls go past them, because their dispatch costs more
than a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._dispatch import Op

# A copy of this package under another name can be in the same process: its operators have a namespace of their own.
PACKAGE = str(__package__)
NAMESPACE = PACKAGE if PACKAGE == "raoe_kernels" else "raoe_kernels_" + re.sub(r"\W", "_", PACKAGE)
Results = Tensor | Iterable[Tensor | None]


def eager(op: Op, backend: str, *tensors: Tensor | None) -> ModuleType | None:
    """The module that takes an eager call of `tensors`, the first of which says where; None where the op's operator has
    to: under torch.compile, and where kernels would be given what is no plain memory, or be missed by torch.jit.trace
    and make_fx, which see torch's own steps alone.

    Kernels know nothing of forward-mode derivatives: tensors that have one are scan's.
    """
    if torch.compiler.is_compiling():
        return None
    device = tensors[0].device  # type: ignore[union-attr]
    module, forward_mode = op.select(device, backend), forward_ad._current_level >= 0
    if (not forward_mode and _plain(tensors)) or module.__name__.endswith((".scan", ".reference")):  # torch's own steps
        return module
    if forward_mode and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors if x is not None):
        if op.wish(backend) == "auto":
            return op.select(device, "scan")
        raise RuntimeError(
            f"backend {op.wish(backend)!r} has no forward-mode derivative of {op.key}; "
            'backend="scan" has one, for tensors that do not require grad'
        )
    return module if _plain(tensors) else None


def _plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nothing is between a kernel and the tensors' memory: no transform, trace or mode around the call, none of
    the tensors that such make, and no zeros or signs that torch has yet to write."""
    around = torch._C._dispatch_tls_local_include_set().raw_repr()
    if around not in _threads(False) and (around not in _threads(True) or _traced()):
        return False
    for x in tensors:
        if x is not None and (type(x) not in _MEMORY or x.is_neg() or x._is_zerotensor()):
            return False
    return True


_MEMORY = (Tensor, torch.nn.Parameter)


@cache
def _threads(modes: bool) -> tuple[int, int]:
    """The dispatcher's keys, as bits, of a thread and of one in inference_mode, when nothing else or only modes of
    torch_dispatch are on."""
    names = ["BackendSelect", "ADInplaceOrView", *["Python", "PythonTLSSnapshot"] * modes]
    bits = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names]
    return sum(bits), sum(bits) - bits[1]


def _traced() -> bool:
    """Whether one of the modes traces, or makes tensors of its own; others watch what is done."""
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) for kind in (kinds.PROXY, kinds.FAKE, kinds.FUNCTIONAL))


def operator(
    op: Op,
    name: str,
    arguments: str,
    results: int,
    run: Callable[..., Results],
    shapes: Callable[..., Results],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., tuple] | None = None,
) -> Callable[..., Any]:
    """Register an operator of `arguments`, a schema's, and a backend's name, and give it.

    run(*arguments, module)     the results, by the backend's module; None stands for an empty one
    shapes(*arguments)          tensors of their shapes and dtypes, None where run gives None
    save, differentiate         what torch.library.register_autograd takes, for an operator that has a gradient
    """

    def kernel(*inputs):
        found = run(*inputs[:-1], op.select(inputs[0].device, inputs[-1]))
        return found if isinstance(found, Tensor) else _apart(_without_none(found, inputs[0]))

    def fake(*inputs):
        found = shapes(*inputs[:-1])
        if isinstance(found, Tensor):
            return found
        return tuple(x.new_empty(x.shape) for x in _without_none(found, inputs[0]))

    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, f"({arguments}, str backend) -> ({', '.join(['Tensor'] * results)})")
    torch.library.impl(qualified, "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(qualified, fake)
    if differentiate:
        torch.library.register_autograd(qualified, differentiate, setup_context=save)
    return getattr(getattr(torch.ops, NAMESPACE), name)


def _without_none(results: Iterable[Tensor | None], like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if x is None else x for x in results]


def _apart(results: list[Tensor]) -> tuple[Tensor, ...]:
    """An operator's results must not share memory; those of a backend may be parts of one buffer."""
    seen: set[int] = set()
    for i, x in enumerate(results):
        x = x.contiguous()
        start = x.untyped_storage().data_ptr()
        results[i] = x.clone() if start in seen else x
        seen.add(start)
    return tuple(results)


def with_gradients(
    op: Op, name: str, arguments: str, gradients: int, run: Callable, shapes: Callable, multiply: Callable | None = None
) -> Callable[..., Any]:
    """An operator that gives a loss and the gradients of its first arguments: backward only scales those.

    multiply(gradient, upstream, dtype) is their product, unless it is something else.
    """
    multiply = multiply or (lambda gradient, upstream, dtype: (gradient * upstream).to(dtype))

    def save(ctx, inputs, output):
        ctx.save_for_backward(*output[1:])
        ctx.dtypes, ctx.count = [x.dtype if x is not None else None for x in inputs[:gradients]], len(inputs)

    def differentiate(ctx, upstream, *_):
        needs = ctx.needs_input_grad[:gradients]
        of = zip(ctx.saved_tensors, ctx.dtypes, needs, strict=True)
        found = (multiply(gradient, upstream, dtype) if need else None for gradient, dtype, need in of)
        return *found, *[None] * (ctx.count - gradients)

    return operator(op, name, arguments, 1 + gradients, run, shapes, save, differentiate)


def with_backward(
    op: Op,
    name: str,
    arguments: str,
    results: int,
    run: Callable[..., Results],
    shapes: Callable[..., Results],
    backward: Callable[..., Results],
    *,
    gradients: int,
    upstream: int = 1,
    unsaved: int = 0,
) -> Callable[..., Any]:
    """An operator, its tensors before its numbers, whose gradient is an operator as well, called NAME_backward.

    backward(*upstream, *arguments, *results, needs, module) -> gradients of the first `gradients` arguments, None where
    not needed; upstream are those of the first `upstream` results, results come without the first `unsaved`.
    """
    tensors = sum(argument.startswith("Tensor") for argument in arguments.split(", "))
    takes = [f"Tensor upstream{i}" for i in range(upstream)]
    takes += [arguments, *(f"Tensor result{i}" for i in range(unsaved, results)), f"bool[{gradients}] needs"]

    def gradient_shapes(*inputs):
        of = inputs[upstream : upstream + gradients]
        return tuple(x.new_empty(x.shape) if need else None for x, need in zip(of, inputs[-1], strict=True))

    gradient = operator(op, f"{name}_backward", ", ".join(takes), gradients, backward, gradient_shapes)

    def save(ctx, inputs, output):
        outputs = output if results > 1 else (output,)
        ctx.save_for_backward(*inputs[:tensors], *outputs[unsaved:])
        *ctx.numbers, ctx.backend = inputs[tensors:]

    def differentiate(ctx, *grads):
        given, kept, needs = ctx.saved_tensors[:tensors], ctx.saved_tensors[tensors:], ctx.needs_input_grad[:gradients]
        found = gradient(*grads[:upstream], *given, *ctx.numbers, *kept, needs, ctx.backend)
        rest = tensors + len(ctx.numbers) + 1 - gradients
        return *(g if need else None for g, need in zip(found, needs, strict=True)), *[None] * rest

    return operator(op, name, arguments, results, run, shapes, save, differentiate)
