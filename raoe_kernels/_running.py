"""torch.logcumsumexp with a forward-mode derivative that is right: torch's own takes exp of the numbers as they are and
is 0 or NaN where they are further apart than the dtype's exponents reach (torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


class _LogCumSumExp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.logcumsumexp(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """sum_{i <= k} exp(x_i - S_k) t_i, the tangents of either sign apart."""
        x, sums = ctx.saved_tensors
        sums = sums.masked_fill(sums == -torch.inf, 0)  # of nothing: the difference of two infinities is no number
        ahead, back = ((x + part.clamp(min=0).log()).logcumsumexp(-1) for part in (tangent, -tangent))
        return (ahead - sums).exp() - (back - sums).exp()


def logcumsumexp(x: Tensor) -> Tensor:
    """Along the last dimension."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return x.logcumsumexp(-1)
    return _LogCumSumExp.apply(x)  # type: ignore[no-any-return]
