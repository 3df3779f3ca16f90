"""A single differentiable function for all pairwise losses, eager and under torch.compile.

A backend has two functions. `forward(similarity, scores, labels, params, need_grad) -> (losses, gradients or None)` has
results of shapes () and (B,), or (2,) and (2, B) with params.parts; for similarity (K, B) they are (K,) and (K, B), or
(2, K) and (2, K, B). They are float64 for float64 similarity, otherwise float32.
`backward(gradients, upstream, dtype) -> gradient of similarity`. Only similarity has a gradient, so forward computes
it, and backward only scales it (params.py).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Backend, Op, refuse_second_derivative, triton_missing
from .._dtypes import wide
from .._native import missing as native_missing
from .._operator import eager, with_gradients
from .params import PairwiseParams, backward

OP = Op(
    "pairwise",
    ("rank_margin_loss", "gated_angular_loss", "raoe_loss", "cosent_loss"),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
        "native": Backend(f"{__package__}.native", native_missing),
    },
    {"cuda": f"{__package__}.by_case"},
)


def pairwise_loss(
    similarity: Tensor, scores: Tensor, labels: Tensor | None, params: PairwiseParams, backend: str
) -> tuple[Tensor, ...]:
    """Return the loss, or its two parts, each a scalar or (K,)."""
    need_grad = similarity.requires_grad and torch.is_grad_enabled()
    module = eager(OP, backend, similarity, scores, labels)
    if module is None:
        losses, _ = _operator(similarity, scores, labels, *params, need_grad, backend)
        return losses.unbind() if params.parts or similarity.ndim == 2 else (losses,)
    if need_grad:
        result = _PairwiseLoss.apply(similarity, scores, labels, params, module)
        return result if params.parts else (result,)
    losses, _ = _run(similarity, scores, labels, params, need_grad, module)
    return losses.unbind() if params.parts else (losses,)


def _run(
    similarity: Tensor,
    scores: Tensor,
    labels: Tensor | None,
    params: PairwiseParams,
    need_grad: bool,
    module: ModuleType,
) -> tuple[Tensor, Tensor | None]:
    if similarity.numel() == 0:
        return _empty(similarity, params, need_grad)
    labels = None if labels is None else labels.contiguous()
    return module.forward(similarity.contiguous(), scores.contiguous(), labels, params, need_grad)


def _empty(similarity: Tensor, params: PairwiseParams, need_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Return zero losses for a batch without pairs; also gives the shapes and dtypes of any call's results."""
    dtype = wide(similarity.dtype)
    losses = similarity.new_zeros((*params.leading, *similarity.shape[:-1]), dtype=dtype)
    grads = similarity.new_zeros((*params.leading, *similarity.shape), dtype=dtype) if need_grad else None
    return losses, grads


class _PairwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, similarity: Tensor, scores: Tensor, labels: Tensor | None, params: PairwiseParams, module):
        losses, grads = _run(similarity, scores, labels, params, True, module)
        ctx.save_for_backward(grads)
        ctx.multiply, ctx.dtype = module.backward, similarity.dtype
        return losses.unbind() if params.parts else losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor):
        refuse_second_derivative("a pairwise loss")
        (grads,) = ctx.saved_tensors
        return ctx.multiply(grads, upstream, ctx.dtype), None, None, None, None


def _operator_forward(similarity, scores, labels, *rest):
    *constants, need_grad, module = rest
    params = PairwiseParams(*constants)
    return _with_parts_dim(similarity, params, _run(similarity, scores, labels, params, need_grad, module))


def _shapes(similarity, scores, labels, *rest):
    *constants, need_grad = rest
    params = PairwiseParams(*constants)
    return _with_parts_dim(similarity, params, _empty(similarity, params, need_grad))


def _with_parts_dim(similarity, params, results):
    """For (K, B), add a dimension for the parts, even for a single part: _scale relies on it."""
    if params.parts or similarity.ndim == 1:
        return results
    return tuple(None if x is None else x[None] for x in results)


def _scale(grads, upstream, dtype):
    parts = upstream.unbind() if upstream.ndim else (upstream,)
    return backward(grads[0] if upstream.ndim == 2 and len(parts) == 1 else grads, parts, dtype)


_operator = with_gradients(
    OP,
    "pairwise",
    "Tensor similarity, Tensor scores, Tensor? labels, bool rank, bool angle, float scale, int threshold, str ties, "
    "float rank_weight, float angle_weight, bool parts, bool need_grad",
    1, _operator_forward, _shapes, _scale,
)  # fmt: skip
