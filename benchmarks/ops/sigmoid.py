"""sigmoid_loss of pairs with gradients of both matrices, of scale and of bias, against the whole matrix of logits.

"eager" is the usual code without a kernel, as in open_clip's SigLipLoss: normalised rows, their product, the log
sigmoid of the product times a matrix of signs, and autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.case import Call, Case, ours
from raoe_kernels import sigmoid_loss

SIZES = {"cpu": [512, 4096], "cuda": [512, 4096, 16384, 65536]}
COLUMNS = {"cpu": 384, "cuda": 768}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TESTS = ["tests/kernels/test_sigmoid.py"]  # test_contrast.py runs with InfoNCE
SCALE, BIAS = 10.0, -10.0
LOGITS_UP_TO = 16384  # most anchors for eager, which stores several matrices of logits, 1 GB each in float32

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def eager(anchors: torch.Tensor, positives: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    logits = (F.normalize(anchors, dim=1) @ F.normalize(positives, dim=1).T).float() * scale + bias
    signs = 2 * torch.eye(len(anchors), device=anchors.device) - 1
    return -F.logsigmoid(signs * logits).sum() / len(anchors)


def least(rows: int, device: str) -> tuple[int, int]:
    """Return bytes and FLOPs: each matrix is read, each gradient written; three products of the logits' size."""
    columns = COLUMNS[device]
    return 2 * 2 * rows * columns * DTYPES[device].itemsize, 3 * 2 * rows * rows * columns


def case(rows: int, device: str) -> Case:
    seeded = torch.Generator().manual_seed(rows)
    columns, dtype = COLUMNS[device], DTYPES[device]
    base = torch.randn(rows, columns, generator=seeded)
    leaves = [(base + noise * torch.randn(rows, columns, generator=seeded)).to(device, dtype) for noise in (0, 0.5)]
    leaves += [torch.tensor(x, device=device) for x in (SCALE, BIAS)]
    for x in leaves:
        x.requires_grad_()

    def step(loss: Loss) -> Call:
        def call(i: int) -> None:
            for x in leaves:
                x.grad = None
            loss(*leaves).backward()

        return call

    result: dict[str, Call] = {}
    for name in ours("sigmoid_loss", device):
        result[f"sigmoid_loss {name}"] = step(
            lambda a, p, scale, bias, name=name: sigmoid_loss(a, p, scale=scale, bias=bias, backend=name)
        )
    missing = {}
    if rows <= LOGITS_UP_TO:
        result |= {"eager": step(eager), "compiled eager": step(torch.compile(eager, dynamic=False))}
    else:
        missing = dict.fromkeys(("eager", "compiled eager"), f"not timed beyond {LOGITS_UP_TO:,} anchors")
    title = f"{rows:,} anchors, {rows:,} columns of {columns}, forward + backward"
    return Case(title, result, *least(rows, device), missing)
