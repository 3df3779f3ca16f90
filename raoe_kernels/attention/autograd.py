"""Bidirectional and dual attention as differentiable functions, eager and under torch.compile.

A backend in plain torch has one function, which autograd differentiates:
    forward(q, k, v, padding, scale, dual) -> (bidirectional,) or (causal, bidirectional).
A backend with its own gradient has three functions. `spans(q, padding)` prepares the
padding for the other two, and `forward` also returns the logsumexps that `backward` needs:
    forward(...) -> (causal, bidirectional, logsumexp causal, logsumexp bidirectional), causal: None if not dual
    backward(grad causal, grad bidirectional, q, k, v, padding, scale, *results of forward, needs) -> (dq, dk, dv)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._operator import eager, with_backward
from .padding import Padding, zeros

OP = Op(
    "attention",
    ("bidirectional_attention", "dual_attention"),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
    {"cuda": f"{__package__}.by_case"},
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool, backend: str
) -> tuple[Tensor, ...]:
    """Return (bidirectional,), or (causal, bidirectional) if dual."""
    module = eager(OP, backend, q, k, v, *padding[:3])
    if module is None:
        results = _operator(q, k, v, *padding[:4], scale, dual, backend)[:2]
        return results if dual else results[1:]
    return _attention(q, k, v, padding, scale, dual, module)


def _attention(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool, module: Any):
    if _is_empty(q, padding):
        return tuple(zeros(q, k, v) for _ in range(1 + dual))
    module = _serving(module, q, padding)
    if not hasattr(module, "backward"):
        return module.forward(q, k, v, padding, scale, dual)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        results = _Attention.apply(q, k, v, padding, scale, dual, module)
        return results if dual else (results,)
    return module.forward(q, k, v, padding, scale, dual)[0 if dual else 1 : 2]


def _serving(module: Any, q: Tensor, padding: Padding) -> Any:
    """Return the module itself, or the module that it chooses for this call."""
    return module.serving(q, padding) if hasattr(module, "serving") else module


def _is_empty(q: Tensor, padding: Padding) -> bool:
    no_sequence = padding.cu_seqlens is not None and padding.cu_seqlens.shape[0] < 2
    return q.numel() == 0 or padding.longest == 0 or no_sequence


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float, dual: bool, module: Any):
        padding = module.spans(q, padding)
        results = module.forward(q, k, v, padding, scale, dual)
        ctx.save_for_backward(q, k, v, *padding[:3], padding.spans, *results)
        ctx.longest, ctx.scale, ctx.module = padding.longest, scale, module
        return results[:2] if dual else results[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        refuse_second_derivative("attention")
        # Read saved_tensors only once: torch's checkpointing does not allow a second read.
        q, k, v, lengths, mask, cu_seqlens, spans, *forward_results = ctx.saved_tensors
        causal, full = grads if len(grads) == 2 else (None, grads[0])
        inputs_grads = ctx.module.backward(
            causal, full, q, k, v, Padding(lengths, mask, cu_seqlens, ctx.longest, spans), ctx.scale,
            *forward_results, ctx.needs_input_grad[:3],
        )  # fmt: skip
        return *inputs_grads, None, None, None, None


def _shapes(q, k, v, lengths, mask, cu_seqlens, longest, scale, dual):
    result, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    return result if dual else None, result, lse if dual else None, lse


def _operator_forward(q, k, v, lengths, mask, cu_seqlens, longest, scale, dual, module):
    padding = Padding(lengths, mask, cu_seqlens, longest)
    module = _serving(module, q, padding)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        return module.forward(q, k, v, padding, scale, dual)
    *causal, full = _attention(q, k, v, padding, scale, dual, module)
    lse = q.new_zeros(q.shape[:-1], dtype=wide(q.dtype))
    return causal[0] if dual else None, full, lse if dual else None, lse


def _operator_backward(
    grad_causal, grad, q, k, v, lengths, mask, cu_seqlens, longest, scale, dual,
    causal, full, lse_causal, lse_full, needs, module,
):  # fmt: skip
    padding = Padding(lengths, mask, cu_seqlens, longest)
    if not dual:
        grad_causal = causal = lse_causal = None
    module = _serving(module, q, padding)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        forward_results = causal, full, lse_causal, lse_full
        return module.backward(grad_causal, grad, q, k, v, padding, scale, *forward_results, tuple(needs))
    # The operator's forward saves nothing for autograd, so run it again.
    with torch.enable_grad():
        q, k, v = inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        results = _attention(q, k, v, padding, scale, dual, module)
    grads = torch.autograd.grad(results, inputs, (grad_causal, grad) if dual else (grad,))
    return tuple(x if need else None for x, need in zip(grads, needs, strict=True))


_operator = with_backward(
    OP,
    "attention",
    "Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? mask, Tensor? cu_seqlens, SymInt longest, float scale, "
    "bool dual",
    4, _operator_forward, _shapes, _operator_backward, gradients=3, upstream=2,
)  # fmt: skip
