"""info_nce_loss with `dims`, eager and under torch.compile.

A backend is one function: `forward(problem, dims, weights, needs) -> (losses, gradients)`. Losses are (K,), of the
first dims[k] columns each; gradients, of anchors, positives and negatives, are those of the sum of weights x losses,
weights being (K,), in the losses' dtype, and None where not needed. The widths share the gradient's products, which
therefore have to know the weights: on a CPU equal ones are expected, and the gradient is made in forward; with others,
and on a GPU, which is not asked whether they are equal, in backward.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from ..._dtypes import wide
from ..._operator import eager, with_backward
from ..._widths import native_missing
from ..problem import Problem

Needs = tuple[bool, ...]
_NONE = (False, False, False)


WIDTHS = Op(
    "info_nce_loss of several widths",
    (),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "native": Backend(f"{__package__}.native", native_missing),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
)


def info_nce_widths(problem: Problem, dims: tuple[int, ...], backend: str) -> Tensor:
    """(K,) losses of a problem that asks for nothing beyond `Problem.beyond_triton`."""
    given = problem.anchors, problem.positives, problem.negatives, *_others(problem)
    needs = tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in given[:3])
    module = eager(WIDTHS, backend, *given)
    if module is None:
        return _operator(*given, dims, problem.scale, problem.symmetric, backend)
    if any(needs):
        return _Widths.apply(module, dims, problem.scale, problem.symmetric, *given)
    return _run(problem, dims, None, _NONE, module)[0]


def _others(problem: Problem) -> tuple[Tensor | None, ...]:
    return problem.targets, problem.ignored, problem.anchor_ids, problem.column_ids


def _problem(scale: float, symmetric: bool, anchors: Tensor, positives: Tensor, negatives: Tensor | None, *others: Any):
    targets, ignored, anchor_ids, column_ids = others
    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    return Problem(
        anchors, positives, negatives, targets=targets, ignored=ignored, anchor_ids=anchor_ids, column_ids=column_ids,
        scale=scale, directions=directions, joint=not symmetric,
    )  # fmt: skip


def _run(
    problem: Problem, dims: tuple[int, ...], weights: Tensor | None, needs: Needs, module: ModuleType
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    anchors, exact = problem.anchors, wide(problem.anchors.dtype)
    if len(anchors) == 0:
        grads = zip(problem.rows, needs, strict=True)
        zeros = tuple(x.new_zeros(x.shape, dtype=exact) if need and x is not None else None for x, need in grads)
        return anchors.new_zeros(len(dims), dtype=exact), zeros
    if weights is None:
        weights = anchors.new_ones(len(dims), dtype=exact)
    # Autocast would make matrix products of the float32 rows in half precision.
    with torch.autocast(anchors.device.type, enabled=False):
        return module.forward(problem, dims, weights, needs)


class _Widths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, dims: Any, scale: float, symmetric: bool, *given: Any) -> Tensor:
        ctx.needs = ctx.needs_input_grad[4:7]
        ctx.made = not given[0].is_cuda
        problem = _problem(scale, symmetric, *given)
        losses, grads = _run(problem, dims, None, ctx.needs if ctx.made else _NONE, module)
        ctx.save_for_backward(*given, *grads)
        ctx.options, ctx.module = (scale, symmetric, dims), module
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):
        refuse_second_derivative("info_nce_loss")
        *given, first, second, third = ctx.saved_tensors
        scale, symmetric, dims = ctx.options
        grads: tuple[Tensor | None, ...] = (first, second, third)
        if ctx.made and bool((upstream == upstream[0]).all()):
            grads = tuple(None if g is None else g * upstream[0] for g in grads)
        else:
            grads = _run(_problem(scale, symmetric, *given), dims, upstream, ctx.needs, ctx.module)[1]
        grads = tuple(None if g is None else g.to(given[0].dtype) for g in grads)
        return None, None, None, None, *grads, None, None, None, None


def _operator_forward(*inputs: Any) -> Tensor:
    *given, dims, scale, symmetric, module = inputs
    return _run(_problem(scale, symmetric, *given), tuple(dims), None, _NONE, module)[0]


def _shapes(*inputs: Any) -> Tensor:
    return inputs[0].new_empty(len(inputs[7]), dtype=wide(inputs[0].dtype))


def _operator_backward(upstream: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    *given, dims, scale, symmetric, needs, module = inputs
    grads = _run(_problem(scale, symmetric, *given), tuple(dims), upstream, tuple(needs), module)[1]
    return tuple(None if g is None else g.to(given[0].dtype) for g in grads)


_operator = with_backward(
    WIDTHS,
    "infonce_widths",
    "Tensor anchors, Tensor positives, Tensor? negatives, Tensor? targets, Tensor? ignored, Tensor? anchor_ids, "
    "Tensor? column_ids, int[] dims, float scale, bool symmetric",
    1, _operator_forward, _shapes, _operator_backward, gradients=3, unsaved=1,
)  # fmt: skip
