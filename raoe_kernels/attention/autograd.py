"""Bidirectional and dual attention as differentiable functions, eager and under torch.compile.

A backend in plain torch is one function, which autograd differentiates:
    forward(q, k, v, padding, scale, dual) -> (bidirectional,) or (causal, bidirectional).
A backend with a written gradient has two, and `forward` gives the logsumexps that its `backward` needs as well:
    forward(...) -> (causal, bidirectional, logsumexp causal, logsumexp bidirectional), the causal ones None if not dual
    backward(grad causal, grad bidirectional, q, k, v, padding, scale, *what forward gave, needs) -> (dq, dk, dv)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .padding import Padding, nothing

OP = Op(
    "attention",
    ("bidirectional_attention", "dual_attention"),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool, backend: str
) -> tuple[Tensor, ...]:
    """(bidirectional,) or (causal, bidirectional)."""
    if torch.compiler.is_compiling():
        results = torch.ops.raoe_kernels.attention(q, k, v, *padding, scale, dual, backend)[:2]
        return results if dual else results[1:]
    return _attention(q, k, v, padding, scale, dual, OP.select(q.device, backend))


def _attention(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool, module: Any):
    if _is_empty(q, padding):
        return tuple(nothing(q, k, v) for _ in range(1 + dual))
    if not hasattr(module, "backward"):
        return module.forward(q, k, v, padding, scale, dual)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        results = _Attention.apply(q, k, v, padding, scale, dual, module)
        return results if dual else (results,)
    return module.forward(q, k, v, padding, scale, dual)[0 if dual else 1 : 2]


def _is_empty(q: Tensor, padding: Padding) -> bool:
    no_sequence = padding.cu_seqlens is not None and padding.cu_seqlens.shape[0] < 2
    return q.numel() == 0 or padding.longest == 0 or no_sequence


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool, module: Any):
        results = module.forward(q, k, v, padding, scale, dual)
        ctx.save_for_backward(q, k, v, *padding[:3], *results)
        ctx.longest, ctx.scale, ctx.module = padding.longest, scale, module
        return results[:2] if dual else results[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        refuse_second_derivative("attention")
        q, k, v, lengths, mask, cu_seqlens = ctx.saved_tensors[:6]
        causal, full = grads if len(grads) == 2 else (None, grads[0])
        found = ctx.module.backward(
            causal, full, q, k, v, Padding(lengths, mask, cu_seqlens, ctx.longest), ctx.scale, *ctx.saved_tensors[6:],
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        return *found, None, None, None, None


# The same as opaque operators, for torch.compile: the backend is looked up when the call runs.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? mask, Tensor? cu_seqlens, SymInt longest, float scale, "
    "bool dual, str backend"
)
torch.library.define(
    "raoe_kernels::attention",
    f"({_ARGUMENTS}) -> (Tensor causal, Tensor bidirectional, Tensor lse_causal, Tensor lse_bidirectional)",
)
torch.library.define(
    "raoe_kernels::attention_backward",
    f"(Tensor? grad_causal, Tensor grad, {_ARGUMENTS}, Tensor causal, Tensor bidirectional, Tensor lse_causal, "
    "Tensor lse_bidirectional, bool[3] needs) -> (Tensor q, Tensor k, Tensor v)",
)


def _shapes(q: Tensor, dual: bool) -> tuple[Tensor, ...]:
    """Buffers of the four results; those of a part that is not asked for are empty."""
    rows, dtype = q.shape[:-1], wide(q.dtype)
    causal, lse_causal = (q.shape, rows) if dual else ((0,), (0,))
    return (
        q.new_empty(causal), q.new_empty(q.shape), q.new_empty(lse_causal, dtype=dtype), q.new_empty(rows, dtype=dtype)
    )  # fmt: skip


@torch.library.impl("raoe_kernels::attention", "CompositeExplicitAutograd")
def _operator(q, k, v, lengths, mask, cu_seqlens, longest, scale, dual, backend):
    module, padding = OP.select(q.device, backend), Padding(lengths, mask, cu_seqlens, longest)
    results = _shapes(q, dual)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        found = module.forward(q, k, v, padding, scale, dual)
    else:
        found = (*(() if dual else (None,)), *_attention(q, k, v, padding, scale, dual, module), None, None)
    for result, value in zip(results, found, strict=True):
        result.copy_(value) if value is not None and result.numel() else result.zero_()
    return results


@torch.library.register_fake("raoe_kernels::attention")
def _fake(q, k, v, lengths, mask, cu_seqlens, longest, scale, dual, backend):
    return _shapes(q, dual)


@torch.library.impl("raoe_kernels::attention_backward", "CompositeExplicitAutograd")
def _operator_backward(
    grad_causal, grad, q, k, v, lengths, mask, cu_seqlens, longest, scale, dual, backend,
    causal, full, lse_causal, lse_full, needs,
):  # fmt: skip
    module, padding = OP.select(q.device, backend), Padding(lengths, mask, cu_seqlens, longest)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        if not dual:
            causal = lse_causal = None
        found = module.backward(
            grad_causal, grad, q, k, v, padding, scale, causal, full, lse_causal, lse_full, tuple(needs)
        )
        return tuple(q.new_empty(0) if x is None else x for x in found)
    # What autograd would have kept was lost with the operator's forward: it runs once more.
    with torch.enable_grad():
        q, k, v = inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        results = _attention(q, k, v, padding, scale, dual, module)
    found = torch.autograd.grad(results, inputs, (grad_causal, grad) if dual else (grad,))
    return tuple(x.contiguous() if need else q.new_empty(0) for x, need in zip(found, needs, strict=True))


@torch.library.register_fake("raoe_kernels::attention_backward")
def _fake_backward(grad_causal, grad, q, k, v, *rest):
    return tuple(x.new_empty(x.shape) if need else x.new_empty(0) for x, need in zip((q, k, v), rest[-1], strict=True))


def _save(ctx, inputs, output):
    q, k, v, lengths, mask, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, lengths, mask, cu_seqlens, *output)


def _differentiate(ctx, grad_causal, grad, _, __):
    *inputs, causal, full, lse_causal, lse_full = ctx.saved_tensors
    dual, needs = ctx.options[2], ctx.needs_input_grad[:3]
    grads = torch.ops.raoe_kernels.attention_backward(
        grad_causal if dual else None, grad, *inputs, *ctx.options, causal, full, lse_causal, lse_full, needs
    )
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 7


torch.library.register_autograd("raoe_kernels::attention", _differentiate, setup_context=_save)
