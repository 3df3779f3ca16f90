"""sigmoid_loss as a differentiable function; what a backend is says _problems.py."""

from __future__ import annotations

from .._dispatch import Backend, Op, triton_missing
from .._problems import differentiable
from .problem import Problem

OP = Op(
    "sigmoid",
    ("sigmoid_loss",),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
)

sigmoid = differentiable(
    OP,
    Problem,
    "Tensor anchors, Tensor positives, Tensor? negatives, Tensor scale, Tensor bias, Tensor? targets, Tensor? ignored, "
    "Tensor? anchor_ids, Tensor? column_ids, Tensor? anchor_groups, Tensor? column_groups",
    5,
    lambda problem: len(problem.anchors) == 0 or problem.column_count == 0,
)
