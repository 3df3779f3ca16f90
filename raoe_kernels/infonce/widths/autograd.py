"""info_nce_loss with `dims`, eager and under torch.compile.

A backend for all widths has one function: `forward(problem, dims, weights, needs) -> (losses, gradients)`. `losses`
is (K,); losses[k] uses the first dims[k] columns. `gradients` are the derivatives of sum(weights x losses), weights
(K,), by anchors, positives and negatives, in the losses' dtype, None if not needed. The widths share the gradient's
products, so the weights must be known. On a CPU forward computes the gradient for equal weights, and backward repeats
it if the weights differ. On a GPU backward always computes it, since comparing weights would wait for the GPU.

A backend for one width (see _problems.py) computes each width separately. On a
GPU "auto" uses Triton's: one pass of it over the logits per width is cheaper
than scan's passes for all widths, although scan shares the products.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._dispatch import Backend, Op, refuse_second_derivative
from ..._dtypes import wide
from ..._operator import eager, with_backward
from ..._problems import Gradients, Needs
from ..._widths import native_missing
from ..autograd import ARGUMENTS, OP
from ..problem import Problem

_NONE = (False, False, False)
_TENSORS = ARGUMENTS.count("Tensor")

WIDTHS = Op(
    "info_nce_loss of several widths",
    (),
    {
        "reference": OP.backends["reference"],
        "scan": Backend(f"{__package__}.scan"),
        "native": Backend(f"{__package__}.native", native_missing),
        "triton": OP.backends["triton"],
    },
)


def info_nce_widths(problem: Problem, dims: tuple[int, ...], backend: str) -> Tensor:
    """Return the (K,) losses of a problem of which `special` is empty and scale a number."""
    needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in problem.rows]
    tensors: Any = problem[:_TENSORS]
    module = eager(WIDTHS, backend, *tensors)
    if module is None:
        return _operator(*problem, dims, backend)
    return _Widths.apply(module, dims, *problem) if any(needs) else _run(problem, dims, None, _NONE, module)[0]


def _run(
    problem: Problem, dims: tuple[int, ...], weights: Tensor | None, needs: Needs, module: Any
) -> tuple[Tensor, Gradients]:
    if weights is None:
        weights = problem.anchors.new_ones(len(dims), dtype=wide(problem.anchors.dtype))
    if len(problem.anchors) == 0:
        return torch.zeros_like(weights), _zeros(problem, needs)
    # Autocast would multiply the float32 rows in half precision.
    with torch.autocast(weights.device.type, enabled=False):
        if hasattr(module, "backward"):
            return _each_width(problem, dims, weights, needs, module)
        return module.forward(problem, dims, weights, needs)


def _zeros(problem: Problem, needs: Needs) -> Gradients:
    rows = zip(problem.rows, needs, strict=True)
    return tuple(x.new_zeros(x.shape, dtype=wide(x.dtype)) if need and x is not None else None for x, need in rows)


def _each_width(
    problem: Problem, dims: tuple[int, ...], weights: Tensor, needs: Needs, module: Any
) -> tuple[Tensor, Gradients]:
    sums, losses, needs = _zeros(problem, needs), [], (*needs, False, False)
    for width, weight in zip(dims, weights.unbind(), strict=True):
        rows: Any = (None if x is None else x[:, :width] for x in problem.rows)
        prefix = problem._replace(**dict(zip(Problem._fields[:3], rows, strict=True)))
        loss, saved = module.forward(prefix, needs)
        losses.append(loss)
        if not any(needs):
            continue
        grads = module.backward(prefix, saved, torch.ones_like(loss), needs, loss.dtype)
        for total, gradient in zip(sums, grads, strict=False):
            if total is not None:
                total[:, :width] += weight * gradient
    return torch.stack(losses), sums


class _Widths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, dims: tuple[int, ...], *fields: Any) -> Tensor:
        ctx.needs = ctx.needs_input_grad[2:5]
        ctx.has_gradients = not fields[0].is_cuda
        losses, grads = _run(Problem(*fields), dims, None, ctx.needs if ctx.has_gradients else _NONE, module)
        ctx.save_for_backward(*fields[:_TENSORS], *grads)
        ctx.options, ctx.dims, ctx.module = fields[_TENSORS:], dims, module
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        refuse_second_derivative("info_nce_loss")
        saved = ctx.saved_tensors
        grads = saved[_TENSORS:]
        if ctx.has_gradients and bool((upstream == upstream[0]).all()):
            grads = tuple(None if g is None else g * upstream[0] for g in grads)
        else:
            problem = Problem(*saved[:_TENSORS], *ctx.options)
            grads = _run(problem, ctx.dims, upstream, ctx.needs, ctx.module)[1]
        grads = tuple(None if g is None else g.to(saved[0].dtype) for g in grads)
        return None, None, *grads, *[None] * (len(Problem._fields) - len(grads))


def _operator_forward(*inputs: Any) -> Tensor:
    *fields, dims, module = inputs
    return _run(Problem(*fields), tuple(dims), None, _NONE, module)[0]


def _shapes(*inputs: Any) -> Tensor:
    return inputs[0].new_empty(len(inputs[-1]), dtype=wide(inputs[0].dtype))


def _operator_backward(upstream: Tensor, *inputs: Any) -> Gradients:
    *fields, dims, needs, module = inputs
    grads = _run(Problem(*fields), tuple(dims), upstream, tuple(needs), module)[1]
    return tuple(None if g is None else g.to(fields[0].dtype) for g in grads)


_operator = with_backward(
    WIDTHS, "infonce_widths", f"{ARGUMENTS}, int[] dims", 1, _operator_forward, _shapes, _operator_backward,
    gradients=3, unsaved=1,
)  # fmt: skip
