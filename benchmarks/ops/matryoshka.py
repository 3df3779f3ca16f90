"""All prefix widths in a single pass, with gradients: raoe_loss over cosines, and info_nce_loss, against the widest
width alone and against a separate loss for each width.

"a loss a width" is the method of sentence-transformers' MatryoshkaLoss: for each width, cut the rows, normalise them
again, and compute the loss. "columns cut" leaves the normalisation to the loss. The loss is always ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.case import Call, Case
from raoe_kernels import info_nce_loss, pairwise_cosine, raoe_loss

SIZES = {"cpu": [512, 4096, 8192, 131072], "cuda": [512, 4096, 8192, 131072]}
WIDTHS = ((12, 24, 48, 96, 192, 384), (24, 48, 96, 192, 384, 768))
PAIRS, ANCHORS = (512, 8192, 131072), (512, 4096)
TESTS = ["tests/kernels/test_matryoshka.py", "tests/kernels/test_matryoshka_contrast.py"]

Loss = Callable[..., torch.Tensor]


def cases(size: int, device: str) -> list[Case]:
    """Return the cases of `size` pairs, and of `size` anchors with equally many positives and hard negatives."""
    result = []
    for dims in WIDTHS:
        if size in PAIRS or size not in ANCHORS:
            result.append(_pairs(size, dims, device))
        if size in ANCHORS:
            result.append(_contrast(size, dims, device))
    return result


def _pairs(count: int, dims: Sequence[int], device: str) -> Case:
    seeded = torch.Generator().manual_seed(count)
    a = torch.randn(count, dims[-1], generator=seeded)
    b = a + torch.randn(count, dims[-1], generator=seeded)
    scores = torch.rand(count, generator=seeded).to(device)
    labels = (2.999 * (1 - scores)).long()
    matrices = [x.to(device).requires_grad_() for x in (a, b)]

    def loss(a: torch.Tensor, b: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        return raoe_loss(pairwise_cosine(a, b, dims=widths), scores, labels)

    title = f"raoe_loss of {count:,} pairs, {len(dims)} widths up to {dims[-1]}, forward + backward"
    # rows are read for the cosines and for the gradient, and the gradient is written
    return Case(title, _contenders(loss, matrices, dims), 6 * 4 * count * dims[-1], 12 * count * dims[-1])


def _contrast(count: int, dims: Sequence[int], device: str) -> Case:
    seeded = torch.Generator().manual_seed(count)
    base = torch.randn(count, dims[-1], generator=seeded)
    noisy = [base + noise * torch.randn(count, dims[-1], generator=seeded) for noise in (0, 0.5, 1)]
    matrices = [x.to(device).requires_grad_() for x in noisy]

    def loss(a: torch.Tensor, p: torch.Tensor, n: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        return info_nce_loss(a, p, n, dims=widths)

    title = f"info_nce_loss of {count:,} anchors, {len(dims)} widths up to {dims[-1]}, forward + backward"
    flops = 3 * 2 * count * 2 * count * dims[-1]
    return Case(title, _contenders(loss, matrices, dims), 2 * 3 * 4 * count * dims[-1], flops)


def _contenders(loss: Loss, matrices: list[torch.Tensor], dims: Sequence[int]) -> dict[str, Call]:
    def step(total: Callable[[], torch.Tensor]) -> Call:
        def call(i: int) -> None:
            for matrix in matrices:
                matrix.grad = None
            total().backward()

        return call

    def a_width_at_a_time(normalise: bool) -> torch.Tensor:
        total, cut = torch.zeros((), device=matrices[0].device), matrices
        for width in reversed(dims):
            cut = [x[:, :width] for x in cut]
            cut = [F.normalize(x, dim=1) for x in cut] if normalise else cut
            total = total + loss(*cut)
        return total

    return {
        "all widths": step(lambda: loss(*matrices, dims).sum()),
        "the widest alone": step(lambda: loss(*matrices)),
        "a loss a width": step(partial(a_width_at_a_time, True)),
        "a loss a width, columns cut": step(partial(a_width_at_a_time, False)),
    }
