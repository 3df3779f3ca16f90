"""Inputs of the pairwise losses: one table for conformance, edges and benchmarks' sanity checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import raoe_kernels

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@dataclass(frozen=True)
class Case:
    """A call: how many pairs, how many distinct scores and labels (0: all different), its options."""

    name: str
    op: str
    pairs: int
    options: dict[str, Any] = field(default_factory=dict)
    levels: int = 0
    classes: int = 3
    step: int = 3  # from one label to the next
    spread: float = 1.0  # similarities lie in [-spread, spread]
    score_dtype: torch.dtype = torch.float32

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """(similarity, scores, labels), the same on every device."""
        seeded = torch.Generator().manual_seed(len(self.name) * 7919 + self.pairs)
        n = self.pairs
        similarity = ((torch.rand(n, generator=seeded, dtype=torch.float64) * 2 - 1) * self.spread).to(dtype)
        if self.levels:
            scores = torch.randint(self.levels, (n,), generator=seeded).to(self.score_dtype)
        else:
            scores = torch.randperm(n, generator=seeded).to(self.score_dtype)
        classes = self.classes or n
        labels = (torch.randint(classes, (n,), generator=seeded) - classes // 2) * self.step
        return similarity.to(device), scores.to(device), labels.to(device)

    def call(self, similarity, scores, labels, backend: str):
        """The op's result(s) on these inputs."""
        op = getattr(raoe_kernels, self.op)
        arguments = (
            (similarity, scores) if self.op in ("rank_margin_loss", "cosent_loss") else (similarity, scores, labels)
        )
        return op(*arguments, **self.options, backend=backend)

    def exponent_range(self, similarity: torch.Tensor, losses: torch.Tensor) -> float:
        """scale x range of what stands in the exponents (similarities, or angles where the op has them), plus the loss.

        Weights are exp(x + Q - L): where scale x range is small, the rounding of L = log(1 + pairs) is the larger part.
        """
        if similarity.numel() == 0:
            return 0.0
        c = similarity.detach().double()
        widest = (c.max() - c.min()).item()
        if self.op in ("gated_angular_loss", "raoe_loss"):
            theta = c.clamp(-1, 1).acos()
            widest = max(widest, (theta.max() - theta.min()).item())
        return self.options.get("scale", 20.0) * widest + losses.abs().max().item()


def _ties(op: str, **options: Any) -> list[Case]:
    return [
        Case(f"{op}-{ties}-{levels or 'no'}-levels", op, 67, {"ties": ties, **options}, levels)
        for ties in ("average", "min", "max", "dense", "ordinal")
        for levels in (0, 2, 9)
    ]


CASES = [
    *_ties("rank_margin_loss", margin=2),
    *_ties("raoe_loss", margin=1.5),
    Case("rank-fractional-margin", "rank_margin_loss", 50, {"margin": 0.5}, levels=20),
    Case("rank-margin-of-all", "rank_margin_loss", 50, {"margin": 49}),
    Case("rank-margin-just-below-all", "rank_margin_loss", 50, {"margin": 48.5}),
    Case("rank-no-margin", "rank_margin_loss", 50, {"margin": 0}),
    Case("rank-scale-1000", "rank_margin_loss", 40, {"scale": 1000.0}),
    Case("rank-scale-tiny", "rank_margin_loss", 40, {"scale": 1e-3}),
    Case("rank-far-outside", "rank_margin_loss", 40, spread=300.0),
    Case("rank-just-linear", "rank_margin_loss", 40, {"scale": 20.0}, spread=2.1),
    Case("rank-int-scores", "rank_margin_loss", 40, levels=7, score_dtype=torch.int64),
    Case("rank-short-scores", "rank_margin_loss", 40, levels=7, score_dtype=torch.int16),
    Case("rank-half-scores", "rank_margin_loss", 40, score_dtype=torch.float16),
    Case("rank-double-scores", "rank_margin_loss", 40, score_dtype=torch.float64),
    Case("cosent", "cosent_loss", 60, levels=5),
    Case("cosent-continuous", "cosent_loss", 60),
    *(
        Case(f"gated-{gate}-{k}", "gated_angular_loss", 60, {"gate": gate}, 11, k)
        for gate in ("label+score", "score", "label")
        for k in (1, 2, 3)
    ),
    Case("gated-16-labels", "gated_angular_loss", 90, classes=16),
    Case("gated-17-labels", "gated_angular_loss", 90, classes=17),
    Case("gated-all-labels", "gated_angular_loss", 60, classes=0, levels=30),
    # 2^63 from the smallest label to the largest, which no int64 holds
    Case("gated-labels-far-apart", "gated_angular_loss", 60, levels=30, step=2**62),
    Case("gated-scale-300", "gated_angular_loss", 40, {"scale": 300.0}),
    Case("gated-clipped", "gated_angular_loss", 40, spread=3.0),
    Case("raoe", "raoe_loss", 129),
    Case("raoe-weights", "raoe_loss", 40, {"rank_weight": 0.3, "angle_weight": -2.0}, levels=6),
    Case("raoe-one-weight", "raoe_loss", 40, {"rank_weight": 0.0}),
    *(Case(f"raoe-gate-{gate}", "raoe_loss", 40, {"gate": gate}, 6) for gate in ("score", "label")),
    *(Case(f"raoe-{n}-pairs", "raoe_loss", n, {"margin": 0}) for n in (1, 2, 3, 4, 5, 16, 17, 255, 256, 257)),
    # consecutive labels; 512 fill the tiles of csrc/pairwise/cuda, where no position is behind the last pair
    *(Case(f"raoe-nli-{n}-pairs", "raoe_loss", n, levels=levels, step=1) for n, levels in ((70, 5), (512, 0))),
    Case("gated-nli", "gated_angular_loss", 70, levels=9, step=1),
]
PARTS = [
    Case("parts", "raoe_loss", 33, {"return_parts": True}, levels=10),
    Case("parts-weights", "raoe_loss", 33, {"return_parts": True, "rank_weight": 3.0, "angle_weight": 0.5}),
    Case("parts-label-gate", "raoe_loss", 33, {"return_parts": True, "gate": "label"}, levels=10),
    Case("parts-score-gate", "raoe_loss", 33, {"return_parts": True, "gate": "score"}, levels=10),
]
