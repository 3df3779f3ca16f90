"""info_nce_loss as a differentiable function; _problems.py describes its backends."""

from __future__ import annotations

from .._dispatch import Backend, Op, triton_missing
from .._problems import differentiable
from .problem import Problem

OP = Op(
    "infonce",
    ("info_nce_loss",),
    {
        "reference": Backend(f"{__package__}.reference"),
        "scan": Backend(f"{__package__}.scan"),
        "triton": Backend(f"{__package__}.triton_kernels", triton_missing),
    },
    {"cuda": f"{__package__}.by_case"},
)

ARGUMENTS = (
    "Tensor anchors, Tensor positives, Tensor? negatives, Tensor? all_anchors, Tensor? learned_scale, Tensor? targets, "
    "Tensor? ignored, Tensor? anchor_ids, Tensor? column_ids, Tensor? guide_anchors, Tensor? guide_positives, "
    "Tensor? guide_negatives, float scale, str directions, bool joint, str hardness, float strength, float margin, "
    "bool relative"
)
info_nce = differentiable(OP, Problem, ARGUMENTS, 5, lambda problem: len(problem.anchors) == 0)
