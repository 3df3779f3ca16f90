"""guided_log_probs on next-token logits of a 128k vocabulary, forward, against the computation of transformers.

Logits are bfloat16 on a GPU and float32 on a CPU; the result is float32. The compiled contender is the formula on whole
rows, which the compiler can fuse freely; `scan` is the same formula in chunks, a loop that it would only unroll.
transformers' processor gets the same input as from `generate`, float32 scores and a model that returns logits, here
precomputed ones. Times include its conversion of the scores, and ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.case import COPIES, Call, Case, ours
from raoe_kernels import guided_log_probs
from raoe_kernels.guided import reference
from raoe_kernels.guided.problem import Problem

SIZES = {"cpu": [8, 64], "cuda": [8, 64, 256]}
VOCABULARY = 128 * 1024
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
GUIDANCE = 1.5
TESTS = ["tests/kernels/test_guided.py", "tests/kernels/test_guided_calls.py"]

Mix = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def eager(current: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    p, q = (torch.nn.functional.log_softmax(x, dim=-1, dtype=torch.float32) for x in (current, previous))
    return GUIDANCE * p - (GUIDANCE - 1) * q


def least(rows: int, device: str) -> tuple[int, int]:
    """Return bytes: both contexts are read once, and a float32 result is written."""
    return rows * VOCABULARY * (2 * DTYPES[device].itemsize + 4), 0


def case(rows: int, device: str) -> Case:
    seeded = torch.Generator().manual_seed(rows)
    dtype = DTYPES[device]
    copies = [
        [(4 * torch.randn(rows, VOCABULARY, generator=seeded)).to(device, dtype) for _ in range(2)]
        for _ in range(COPIES if rows <= 64 else 1)  # larger inputs do not stay in a cache anyway
    ]

    def step(mix: Mix) -> Call:
        return lambda i: mix(*copies[i % len(copies)])

    result: dict[str, Call] = {}
    for name in ours("guided_log_probs", device):
        result[f"guided_log_probs {name}"] = step(
            lambda x, y, name=name: guided_log_probs(x, y, guidance=GUIDANCE, backend=name)
        )
    result["eager"] = step(eager)
    result["compiled reference"] = step(
        torch.compile(lambda x, y: reference.forward(Problem(x, y, GUIDANCE), ())[0], dynamic=False, fullgraph=True)
    )
    missing = {}
    try:
        result["transformers CFG processor"] = step(_transformers(rows, device))
    except ImportError as error:
        missing["transformers CFG processor"] = str(error)
    return Case(f"{rows} rows of {VOCABULARY:,} logits, forward", result, *least(rows, device), missing)


def _transformers(rows: int, device: str) -> Mix:
    from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor as Processor

    class Output(dict):
        def __init__(self, logits: torch.Tensor) -> None:
            super().__init__()
            self.logits = logits

    ids = torch.zeros(rows, 1, dtype=torch.long, device=device)

    def mix(current: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        # Create a processor for each call, because its attention mask grows by a token per call.
        processor = Processor(GUIDANCE, lambda *_, **__: Output(previous[:, None]))
        return processor(ids, current.float())

    return mix
