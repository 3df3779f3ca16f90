"""list_mle_loss on lists of 33 sentences (one chain each), forward + backward, against eager autograd and the compiler.

"eager" sorts, gathers and takes one logcumsumexp, and autograd computes the gradient. "compiled scan" returns loss and
gradient without autograd. The teachers are computed beforehand by refine_similarity, which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.case import COPIES, Call, Case
from raoe_kernels import list_mle_loss, refine_similarity
from raoe_kernels.listwise import scan
from raoe_kernels.listwise.problem import Problem

SIZES = {"cpu": [33, 1056], "cuda": [33, 1056, 65536]}
ITEMS = 33
SCALE = 20.0
TESTS = ["tests/kernels/test_listwise.py", "tests/kernels/test_refine_similarity.py"]


def eager(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    order = teacher.sort(dim=1, descending=True, stable=True).indices
    s = SCALE * student.gather(1, order)
    return (s.flip(1).logcumsumexp(1).flip(1) - s).sum(1).mean()


def least(lists: int, device: str) -> tuple[int, int]:
    """Return bytes: student and teacher are read, and a gradient is written."""
    return 3 * 4 * lists * ITEMS, 0


def case(lists: int, device: str) -> Case:
    seeded = torch.Generator().manual_seed(lists)
    copies = []
    for _ in range(COPIES):
        chains = torch.rand(-(-lists // ITEMS), ITEMS, ITEMS, generator=seeded)
        teacher = refine_similarity(chains, 0.5).reshape(-1, ITEMS)[:lists].clone()
        student = teacher + 0.2 * torch.randn(lists, ITEMS, generator=seeded)
        copies.append((student.to(device).requires_grad_(), teacher.to(device)))

    def step(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Call:
        def call(i: int) -> None:
            student, teacher = copies[i % COPIES]
            student.grad = None
            loss(student, teacher).backward()

        return call

    compiled = torch.compile(lambda s, t: scan.forward(Problem(s, t, None, None, SCALE), (True,)), dynamic=False)
    result: dict[str, Call] = {
        "list_mle_loss scan": step(lambda s, t: list_mle_loss(s, t, scale=SCALE, backend="scan")),
        "eager": step(eager),
        "compiled eager": step(torch.compile(eager, dynamic=False)),
        "compiled scan": lambda i: compiled(copies[i % COPIES][0].detach(), copies[i % COPIES][1]),
    }
    return Case(f"{lists:,} lists of {ITEMS}, forward + backward", result, *least(lists, device))
