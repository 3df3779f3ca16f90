"""What interpreter.py puts in the place of Triton's loops gives what they give."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import HAS_GPU

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(HAS_GPU, reason="Triton is compiled here, not interpreted")
import triton.language as tl  # noqa: E402


@triton.jit
def _of_groups(begins, x, begins_too, y):
    """Sums that begin anew: which is before which matters."""
    return begins | begins_too, tl.where(begins_too != 0, y, x + y)


@triton.jit
def _kernel(given, made, AXIS: tl.constexpr, KEEP: tl.constexpr, REVERSE: tl.constexpr):
    p = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    pair = tl.load(given + p), tl.load(given + 32 + p)
    _, sums = tl.associative_scan(pair, AXIS, _of_groups, reverse=REVERSE)
    tl.store(made + p, sums)
    begins, total = tl.reduce(pair, AXIS, _of_groups, keep_dims=KEEP)
    if KEEP:
        tl.store(made + 32 + p, total + begins + tl.zeros_like(sums))
    elif AXIS == 0:
        tl.store(made + 32 + tl.arange(0, 8), total + begins)
    else:
        tl.store(made + 32 + tl.arange(0, 4), total + begins)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_doubling_is_one_by_one(axis, keep, reverse):
    from tests.kernels import interpreter

    seeded = torch.Generator().manual_seed(axis)
    given = torch.cat([torch.rand(32, generator=seeded) < 0.3, torch.randint(100, (32,), generator=seeded)]).long()
    made = {}
    try:
        for name, ways in {"one by one": interpreter.ONE_BY_ONE, "doubling": ()}.items():
            interpreter.install(*ways)
            made[name] = torch.full((64,), -1)
            _kernel[(1,)](given, made[name], axis, keep, reverse)
    finally:
        interpreter.install()
    assert torch.equal(made["one by one"], made["doubling"]) and made["doubling"][:32].ge(0).all()
    assert made["doubling"][32:].ge(0).sum() == (32 if keep else (8, 4)[axis])
