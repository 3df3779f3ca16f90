"""pairwise_cosine, forward and backward to both matrices, against torch's cosine_similarity; 384 columns (MiniLM)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.timing import Call
from raoe_kernels import backends, pairwise_cosine

SIZES = {"cpu": [64, 512, 8192, 65536], "cuda": [64, 512, 8192, 65536, 1 << 20]}
COLUMNS = 384


def contenders(pairs: int, device: str) -> dict[str, Call]:
    seeded = torch.Generator().manual_seed(pairs)
    a, b = (torch.randn(pairs, COLUMNS, generator=seeded).to(device).requires_grad_() for _ in range(2))
    upstream = torch.rand(pairs, generator=seeded).to(device)

    def step(cosine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Call:
        def call() -> None:
            a.grad = b.grad = None
            cosine(a, b).backward(upstream)

        return call

    available = backends(device)["pairwise_cosine"]
    result: dict[str, Call] = {}
    for name in ("native", "triton", "scan"):
        if available[name] is True and not (name == "triton" and device == "cpu"):
            result[f"pairwise_cosine {name}"] = step(lambda a, b, name=name: pairwise_cosine(a, b, backend=name))
    result["torch cosine_similarity"] = step(F.cosine_similarity)
    result["compiled cosine_similarity"] = step(torch.compile(F.cosine_similarity, dynamic=False))
    return result
