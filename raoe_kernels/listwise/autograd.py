"""list_mle_loss as a differentiable function, and refine_similarity, which has no gradient.

A backend has the functions that _problems.py describes, and `refine(phi (C, n, n), mask (C, n), omega) -> (C, n, n)`,
float64 for float64 phi, otherwise float32; n is at least 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._dispatch import Backend, Op
from .._dtypes import wide
from .._operator import eager, operator
from .._problems import differentiable
from .problem import Problem

OP = Op(
    "listwise",
    ("list_mle_loss", "refine_similarity"),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
    },
)

list_mle = differentiable(
    OP,
    Problem,
    "Tensor student, Tensor teacher, Tensor? mask, Tensor? order, float scale",
    1,
    lambda problem: problem.student.numel() == 0,
)


def refine(phi: Tensor, mask: Tensor | None, omega: float, backend: str) -> Tensor:
    module = eager(OP, backend, phi, mask)
    return _refine_operator(phi, mask, omega, backend) if module is None else _refine(phi, mask, omega, module)


def _refine(phi: Tensor, mask: Tensor | None, omega: float, module: Any) -> Tensor:
    if phi.numel() == 0:
        return phi.new_empty(phi.shape, dtype=wide(phi.dtype))
    n = phi.shape[-1]
    lists = None if mask is None else mask.reshape(-1, n)
    return module.refine(phi.detach().reshape(-1, n, n), lists, omega).reshape(phi.shape)


_refine_operator = operator(
    OP, "refine_similarity", "Tensor phi, Tensor? mask, float omega", 1, _refine,
    lambda phi, *_: phi.new_empty(phi.shape, dtype=wide(phi.dtype)),
)  # fmt: skip
