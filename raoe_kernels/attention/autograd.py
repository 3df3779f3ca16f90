"""Bidirectional and dual attention as differentiable functions, in eager mode and under torch.compile.

Attention does not use the interface of the other ops (_contract.py), for three reasons. First, an attention call
returns one or two results. Second, the backends in plain torch have no `backward`: autograd differentiates them. Third,
under torch.compile, the backward pass must not draw a new dropout mask.

A backend in plain torch has one function, forward(q, k, v, padding, options), which returns one result for each entry
of options.causal. A backend with a hand-written gradient has three functions. `spans(q, padding)` prepares the padding
for `forward` and `backward`. `forward` also returns the logsumexps that `backward` needs. Below, the "last" result is
the result for options.causal[-1], and the "causal" result is the first result of a dual call:
    forward(...) -> (causal result, last result, causal logsumexp, last logsumexp); except in dual calls, the causal
        result and its logsumexp are None
    backward(grad causal, grad last, q, k, v, padding, options, *results of forward, needs) -> (dq, dk, dv)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import Op, backends, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._operator import eager, like, operator, savable
from . import scan
from .padding import Options, Padding, zeros

LONG = 512  # longest sentence, in tokens, for which the Triton kernels are used even where FlashAttention can run
WIDE = 128  # largest head dimension for which the Triton kernels keep their accumulators in registers


class Problem(NamedTuple):
    """Values that determine which backend runs a call. `operator` is True in a call through the torch.library
    operator."""

    q: Tensor
    padding: Padding
    options: Options
    operator: bool


def by_case(problem: Problem) -> str:
    """Return the backend that "auto" selects on CUDA: "scan" (torch's attention) if it is expected to be as fast as
    "triton", otherwise "triton" (see the README).

    In a torch.library operator, the backward pass of `scan` has to repeat the forward pass. For packed sentences, the
    repetition takes more time than FlashAttention saves. With dropout, `reference` would replace `scan` (see _select),
    and would keep all attention weights in memory.
    """
    q, padding, options, operator = problem
    if operator and options.dropout_p:
        return "triton"
    if q.shape[-1] > WIDE:
        return "scan"
    unpadded = padding.cu_seqlens is None and padding.lengths is None and padding.mask is None
    half = q.dtype in (torch.float16, torch.bfloat16)
    packed = not operator and len(options.causal) == 1 and scan.takes_packed(q, padding)
    return "scan" if padding.longest > LONG and (packed or (unpadded and half)) else "triton"


OP = Op(
    "attention",
    ("bidirectional_attention", "dual_attention"),
    backends(__package__, triton=triton_missing),
    by_case=by_case,
)


def attention(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options, backend: str) -> tuple[Tensor, ...]:
    """Return one attention result for each entry of options.causal."""
    if options.dropout_p:  # draw the seed on the device, so that the host does not wait
        options = options._replace(seed=torch.randint(2**63 - 1, (), device=q.device))
    module = eager(OP, backend, (q, k, v, *padding[:3]), Problem(q, padding, options, False))
    if module is None:
        scale, causal, dropout_p, seed = options
        results = _operator(q, k, v, *padding[:3], seed, padding.longest, scale, causal, dropout_p, backend)
        return results[2 - len(causal) : 2]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        q, k, v, lengths, mask, cu_seqlens = savable((q, k, v, *padding[:3]))
        padding = Padding(lengths, mask, cu_seqlens, padding.longest)
    return _attention(q, k, v, padding, options, module)


def _attention(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options, module: Any):
    if _is_empty(q, padding):
        return tuple(zeros(q, k, v) for _ in options.causal)
    if not hasattr(module, "backward"):
        return module.forward(q, k, v, padding, options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, padding, options, module)
    return module.forward(q, k, v, padding, options)[2 - len(options.causal) : 2]


def _select(q: Tensor, padding: Padding, options: Options, backend: str) -> Any:
    """Return the backend for a call that goes through the torch.library operator, as under torch.compile.

    The operator's backward pass would run the forward pass of `scan` again, for which torch would draw a new dropout
    mask. So with dropout, `reference` replaces `scan`.
    """
    problem = Problem(q, padding, options, True)
    module = OP.select(q.device, backend, problem)
    redrawn = options.dropout_p and module.__name__.endswith(".scan")
    return OP.select(q.device, "reference", problem) if redrawn else module


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


def _operator_forward(q, k, v, lengths, mask, cu_seqlens, seed, longest, scale, causal, dropout_p, backend):
    padding, options = Padding(lengths, mask, cu_seqlens, longest), Options(scale, tuple(causal), dropout_p, seed)
    module = _select(q, padding, options, backend)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        return module.forward(q, k, v, padding, options)
    *first, last = _attention(q, k, v, padding, options, module)
    lse = q.new_zeros(q.shape[:-1], dtype=wide(q.dtype))
    return first[0] if first else None, last, lse if first else None, lse


def _operator_backward(
    grad_first, grad_last, q, k, v, lengths, mask, cu_seqlens, seed, longest, scale, causal, dropout_p,
    first, last, lse_first, lse_last, needs, backend,
):  # fmt: skip
    padding, options = Padding(lengths, mask, cu_seqlens, longest), Options(scale, tuple(causal), dropout_p, seed)
    if len(causal) == 1:
        grad_first = first = lse_first = None
    module = _select(q, padding, options, backend)
    if hasattr(module, "backward") and not _is_empty(q, padding):
        forward_results = first, last, lse_first, lse_last
        return module.backward(grad_first, grad_last, q, k, v, padding, options, *forward_results, tuple(needs))
    # The operator's forward pass ran without autograd, so run the backend's forward again, and differentiate it.
    with torch.enable_grad():
        q, k, v = inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        results = _attention(q, k, v, padding, options, module)
    grads = torch.autograd.grad(results, inputs, (grad_first, grad_last)[2 - len(causal) :])
    return tuple(x if need else None for x, need in zip(grads, needs, strict=True))


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? mask, Tensor? cu_seqlens, Tensor? seed, SymInt longest, "
    "float scale, bool[] causal, float dropout_p"
)
_operator_gradients = operator(
    "attention_backward",
    f"Tensor grad_first, Tensor grad_last, {_ARGUMENTS}, Tensor first, Tensor last, Tensor lse_first, Tensor lse_last, "
    "bool[3] needs",
    3, _operator_backward, lambda grad_first, grad_last, *inputs: like(inputs[:3], inputs[-1]),
)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[-1], *inputs[:7], *output)
    ctx.others, ctx.backend = inputs[7:-2], inputs[-2]


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    (numbers, *saved), needs = ctx.saved_tensors, ctx.needs_input_grad[:3]
    inputs = *saved[:7], *ctx.others, *saved[7:], needs, ctx.backend
    by_inputs = _operator_gradients(*grads[:2], *inputs, numbers=numbers)
    return *(g if need else None for g, need in zip(by_inputs, needs, strict=True)), *[None] * 10


_operator = operator("attention", _ARGUMENTS, 4, _operator_forward, _shapes, (_save, _differentiate))
