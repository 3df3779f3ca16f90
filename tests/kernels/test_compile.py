"""The ops under torch.compile and as registered operators."""

from __future__ import annotations

import pytest
import torch

from raoe_kernels import raoe_loss, use_backend
from tests.kernels.pairwise_cases import Case


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
