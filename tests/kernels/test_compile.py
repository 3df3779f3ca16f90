"""The ops under torch.compile and as registered operators."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import gated_angular_loss, pairwise_cosine, rank_margin_loss, raoe_loss, use_backend
from raoe_kernels.pairwise.problem import constants
from tests.kernels.pairwise_cases import Case


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_opcheck_pairwise(labelled, parts, place):
    device, backend = place
    c, s, l = Case("opcheck", "raoe_loss", 9, levels=4).inputs(torch.float32, device)
    arguments = constants(True, True, 20.0, margin=1, parts=parts)
    torch.library.opcheck(
        torch.ops.raoe_kernels.pairwise.default,
        (c.requires_grad_(), s, l if labelled else None, *arguments, [1], backend),
    )


def test_opcheck_cosine(place):
    device, backend = place
    a, b = (torch.randn(3, 5, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.raoe_kernels.cosine.default, (a, b, 1e-8, None, [1, 1], backend))


def test_fullgraph_gives_the_same(place):
    device, backend = place

    def step(a, b, s, l):
        c = pairwise_cosine(a, b, backend=backend)
        rank, angle = raoe_loss(c, s, l, margin=1, return_parts=True, backend=backend)
        return (
            rank
            + 2 * angle
            + rank_margin_loss(c, s, backend=backend)
            + gated_angular_loss(c, s, l, gate="label", backend=backend)
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for pairs in (6, 9):
        _, s, l = Case("compile", "raoe_loss", pairs, levels=4).inputs(torch.float32, device)
        seeded = torch.Generator().manual_seed(pairs)
        rows = [torch.randn(pairs, 8, generator=seeded).to(device).requires_grad_() for _ in range(2)]
        eager, traced = step(*rows, s, l), compiled(*rows, s, l)
        torch.testing.assert_close(traced, eager)
        for x, y in zip(torch.autograd.grad(traced, rows), torch.autograd.grad(eager, rows), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.slow
def test_inductor_and_a_block_around_the_call():
    c, s, l = Case("inductor", "raoe_loss", 32).inputs(torch.float32)
    compiled = torch.compile(lambda c: raoe_loss(c * 1.0, s, l), fullgraph=True)
    for backend in ("reference", "scan", "auto"):
        with use_backend(backend):  # looked up when the call runs, not when it was traced
            x, y = (c.clone().requires_grad_() for _ in range(2))
            compiled(x).backward()
            raoe_loss(y, s, l).backward()
            torch.testing.assert_close(x.grad, y.grad)
