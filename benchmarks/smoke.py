"""Kernels that changed since they last ran on a GPU, each compared with scan and timed: pairwise_cosine with dims, for
bit-equal gradients of many calls; raoe_loss; InfoNCE with ids and targets in one and four directions; and packed
attention with grouped heads, causal and with dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, ours
from benchmarks.ops.infonce import COLUMNS, FORMS, SCALE
from benchmarks.ops.pairwise import inputs
from raoe_kernels import bidirectional_attention, info_nce_loss, pairwise_cosine, raoe_loss

SIZES = {"cpu": [64, 1024], "cuda": [512, 8192, 131072, 1 << 20]}
OTHERS_UP_TO = {"cpu": 64, "cuda": 8192}  # largest size of InfoNCE and attention
REPEATS = {"cpu": 3, "cuda": 10_000}  # of pairwise_cosine
HEADS = {"cpu": (4, 2, 16), "cuda": (28, 4, 128)}  # of queries and of keys, head dimension
FROM_SCAN = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # largest relative difference of a result or gradient
TESTS = ["tests/kernels/test_dispatch.py"]

Op = Callable[..., Tensor]


def cases(size: int, device: str) -> Iterator[Case]:
    similarity, scores, labels = inputs(size, device)
    yield case("raoe_loss", f"raoe_loss, {size:,} pairs", device, [similarity],
               lambda x, **on: raoe_loss(x, scores, labels, **on))  # fmt: skip
    if size > OTHERS_UP_TO[device]:
        return
    seeded = torch.Generator().manual_seed(size)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=seeded).to(device, dtype).requires_grad_()

    width = COLUMNS[device]
    rows, dims = [drawn(size, width) for _ in range(2)], (width // 6, width // 3, width // 2, width)
    title = f"pairwise_cosine with dims, {size:,} pairs"
    repeats = REPEATS[device] if size == min(SIZES[device]) else 0
    yield case("pairwise_cosine", title, device, rows,
               lambda a, b, **on: pairwise_cosine(a, b, dims=dims, **on), repeats)  # fmt: skip
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    matrices = [drawn(size, width, dtype=dtype) for _ in range(3)]
    anchors = torch.arange(size, device=device, dtype=torch.int32)
    more: dict[str, Any] = {"ignore": (anchors // 2, torch.cat((anchors // 2, anchors + size)))}
    more["targets"] = torch.arange(size, device=device)
    for name, form in {"one direction": {}, "four directions": FORMS["four directions"]}.items():
        yield case("info_nce_loss", f"info_nce_loss with ids and targets, {name}, {size:,} anchors", device, matrices,
                   lambda *x, form=form, **on: info_nce_loss(*x, scale=SCALE, **more, **form, **on))  # fmt: skip
    heads, groups, width = HEADS[device]
    lengths = torch.randint(5, 61, (max(1, size // 8),), generator=seeded)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    tokens, where = int(lengths.sum()), {"cu_seqlens": ends, "max_seqlen": int(lengths.max())}
    packed = [drawn(tokens, count, width, dtype=dtype) for count in (heads, groups, groups)]
    for title, options in {"full": {}, "causal": {"causal": True}, "dropout": {"dropout_p": 0.1}}.items():
        yield case("bidirectional_attention", f"attention with {heads}/{groups} heads, {title}, size {size:,}", device,
                   packed, lambda *x, o=options, **on: bidirectional_attention(*x, **where, **o, **on),
                   random="dropout_p" in options)  # fmt: skip


def case(
    function: str, title: str, device: str, leaves: list[Tensor], op: Op, repeats: int = 0, random: bool = False
) -> Case:
    """Forward and backward in each backend."""

    def step(backend: str) -> list[Tensor]:
        result = op(*leaves, backend=backend)
        return [result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result))]

    def details(backend: str) -> dict[str, Any]:
        results = step(backend)
        row: dict[str, Any] = {}
        if repeats and backend != "scan":
            changed = sum(differ(results, step(backend)) for _ in range(repeats))
            row |= {"changed": int(changed), "repeats": repeats}
        if random:  # backends draw other numbers
            row["difference"] = 0.0 if all(bool(x.isfinite().all()) for x in results) else float("nan")
        else:
            row["difference"] = max(map(distance, results, step("scan")))
        wrong = row.get("changed") or not row["difference"] <= FROM_SCAN[leaves[0].dtype]
        return row | ({"failed": True} if wrong else {})

    # scan first, because an error of the first contender ends a benchmark
    others = [name for name in ours(function, device) if name != "scan"]
    if function == "raoe_loss" and len(leaves[0]) > 2048 and "triton" in others:
        others.remove("triton")  # its kernel has one block
    contenders = {backend: lambda i, backend=backend: step(backend) for backend in ("scan", *others)}
    size = sum(x.numel() * x.element_size() for x in leaves)
    return Case(f"{title}, forward + backward", contenders, 2 * size, rounds=8, details=details)


def differ(results: list[Tensor], others: list[Tensor]) -> Tensor:
    """Whether two lists of results differ in a bit, as a number on their device."""
    return torch.stack([(x != y).any() for x, y in zip(results, others, strict=True)]).any().long()


def distance(x: Tensor, y: Tensor) -> float:
    """Distance of x from y, relative to y."""
    return float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30))
