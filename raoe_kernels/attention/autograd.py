"""Bidirectional and dual attention as differentiable functions, eager and under torch.compile.

A backend in plain torch has one function, which autograd differentiates:
    forward(q, k, v, padding, options) -> one result for each entry of options.causal.
A backend with its own gradient has three functions. `spans(q, padding)` prepares the
padding for the other two, and `forward` also returns the logsumexps that `backward` needs:
    forward(...) -> (first of a dual call or None, last result, their logsumexps)
    backward(grad first, grad last, q, k, v, padding, options, *results of forward, needs) -> (dq, dk, dv)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._operator import eager, with_backward
from .padding import Options, Padding, zeros

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


def attention(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options, backend: str) -> tuple[Tensor, ...]:
    """Return one result for each entry of options.causal."""
    if options.dropout_p:  # drawn on the device, so that nothing waits for it
        options = options._replace(seed=torch.randint(2**63 - 1, (), device=q.device))
    module = eager(OP, backend, q, k, v, *padding[:3])
    if module is None:
        scale, causal, dropout_p, seed = options
        results = _operator(q, k, v, *padding[:3], seed, padding.longest, scale, causal, dropout_p, backend)
        return results[2 - len(causal) : 2]
    return _attention(q, k, v, padding, options, module)


def _attention(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options, module: Any, operator=False):
    if _is_empty(q, padding):
        return tuple(zeros(q, k, v) for _ in options.causal)
    module = _serving(module, q, padding, options, operator)
    if not hasattr(module, "backward"):
        return module.forward(q, k, v, padding, options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, padding, options, module)
    return module.forward(q, k, v, padding, options)[2 - len(options.causal) : 2]


def _serving(module: Any, q: Tensor, padding: Padding, options: Options, operator: bool) -> Any:
    """Return the module itself, or the module that it chooses for this call.

    The backward pass of the operator runs scan's forward pass again, for which torch
    would draw other random numbers. With dropout `reference` therefore replaces it.
    """
    module = module.serving(q, padding, options, operator) if hasattr(module, "serving") else module
    redrawn = operator and options.dropout_p and module.__name__.endswith(".scan")
    return OP.select(q.device, "reference") if redrawn else module


def _is_empty(q: Tensor, padding: Padding) -> bool:
    no_sequence = padding.cu_seqlens is not None and padding.cu_seqlens.shape[0] < 2
    return q.numel() == 0 or padding.longest == 0 or no_sequence


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options, module: Any):
        padding = module.spans(q, padding)
        results = module.forward(q, k, v, padding, options)
        ctx.save_for_backward(q, k, v, *padding[:3], padding.spans, options.seed, *results)
        ctx.longest, ctx.options, ctx.module = padding.longest, options._replace(seed=None), module
        return results[2 - len(options.causal) : 2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        refuse_second_derivative("attention")
        # Read saved_tensors only once: torch's checkpointing does not allow a second read.
        q, k, v, lengths, mask, cu_seqlens, spans, seed, *forward_results = ctx.saved_tensors
        inputs_grads = ctx.module.backward(
            grads[0] if len(grads) == 2 else None, grads[-1], q, k, v,
            Padding(lengths, mask, cu_seqlens, ctx.longest, spans), ctx.options._replace(seed=seed), *forward_results,
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        return *inputs_grads, None, None, None


def _shapes(q, k, v, lengths, mask, cu_seqlens, seed, longest, scale, causal, dropout_p):
    result, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    dual = len(causal) == 2
    return result if dual else None, result, lse if dual else None, lse


def _operator_forward(q, k, v, lengths, mask, cu_seqlens, seed, longest, scale, causal, dropout_p, module):
    padding, options = Padding(lengths, mask, cu_seqlens, longest), Options(scale, tuple(causal), dropout_p, seed)
    module = _serving(module, q, padding, options, True)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        return module.forward(q, k, v, padding, options)
    *first, last = _attention(q, k, v, padding, options, module, True)
    lse = q.new_zeros(q.shape[:-1], dtype=wide(q.dtype))
    return first[0] if first else None, last, lse if first else None, lse


def _operator_backward(
    grad_first, grad_last, q, k, v, lengths, mask, cu_seqlens, seed, longest, scale, causal, dropout_p,
    first, last, lse_first, lse_last, needs, module,
):  # fmt: skip
    padding, options = Padding(lengths, mask, cu_seqlens, longest), Options(scale, tuple(causal), dropout_p, seed)
    if len(causal) == 1:
        grad_first = first = lse_first = None
    module = _serving(module, q, padding, options, True)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        forward_results = first, last, lse_first, lse_last
        return module.backward(grad_first, grad_last, q, k, v, padding, options, *forward_results, tuple(needs))
    # The operator's forward saves nothing for autograd, so run it again.
    with torch.enable_grad():
        q, k, v = inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        results = _attention(q, k, v, padding, options, module, True)
    grads = torch.autograd.grad(results, inputs, (grad_first, grad_last)[2 - len(causal) :])
    return tuple(x if need else None for x, need in zip(grads, needs, strict=True))


_operator = with_backward(
    OP,
    "attention",
    "Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? mask, Tensor? cu_seqlens, Tensor? seed, SymInt longest, "
    "float scale, bool[] causal, float dropout_p",
    4, _operator_forward, _shapes, _operator_backward, gradients=3, upstream=2,
)  # fmt: skip
