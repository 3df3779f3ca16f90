"""pairwise_cosine, forward and backward to both matrices, against torch's cosine_similarity; 384 columns (MiniLM)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.case import COPIES, Call, Case, ours
from raoe_kernels import pairwise_cosine

SIZES = {"cpu": [64, 512, 8192, 65536], "cuda": [64, 512, 8192, 65536, 1 << 20]}
COLUMNS = 384
TESTS = ["tests/kernels/test_cosine.py"]


def least(pairs: int, device: str) -> tuple[int, int]:
    """Return bytes and FLOPs: both matrices are read twice (the gradient needs the cosine), two gradients written."""
    return 6 * 4 * pairs * COLUMNS, 12 * pairs * COLUMNS


def case(pairs: int, device: str) -> Case:
    seeded = torch.Generator().manual_seed(pairs)
    copies = COPIES if pairs < 1 << 18 else 1  # matrices of a gigabyte do not stay in a cache anyway
    rows = [
        [torch.randn(pairs, COLUMNS, generator=seeded).to(device).requires_grad_() for _ in range(2)]
        for _ in range(copies)
    ]
    upstream = torch.rand(pairs, generator=seeded).to(device)

    def step(cosine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Call:
        def call(i: int) -> None:
            a, b = rows[i % copies]
            a.grad = b.grad = None
            cosine(a, b).backward(upstream)

        return call

    result: dict[str, Call] = {}
    for name in ours("pairwise_cosine", device):
        result[f"pairwise_cosine {name}"] = step(lambda a, b, name=name: pairwise_cosine(a, b, backend=name))
    result["torch cosine_similarity"] = step(F.cosine_similarity)
    result["compiled cosine_similarity"] = step(torch.compile(F.cosine_similarity, dynamic=False))
    return Case(f"{pairs:,} pairs of {COLUMNS} columns, forward + backward", result, *least(pairs, device))
