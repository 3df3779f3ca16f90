"""torch.logcumsumexp with a correct forward-mode derivative. In torch 2.13, the built-in derivative computes exp of the
inputs without first subtracting their maximum. So the derivative is 0 or NaN if the inputs differ by more than the
dtype's exponent range."""

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
        """Return the tangent of each output S_k, which is the sum over i <= k of exp(x_i - S_k) t_i, where x are the
        inputs and t their tangents. Positive and negative tangents are summed separately, because the sums are computed
        in log space."""
        x, sums = ctx.saved_tensors
        sums = sums.masked_fill(sums == -torch.inf, 0)  # -inf marks an empty sum: avoid -inf - (-inf)
        positive, negative = ((x + part.clamp(min=0).log()).logcumsumexp(-1) for part in (tangent, -tangent))
        return (positive - sums).exp() - (negative - sums).exp()


def logcumsumexp(x: Tensor) -> Tensor:
    """Return logcumsumexp along the last dimension."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return x.logcumsumexp(-1)
    return _LogCumSumExp.apply(x)  # type: ignore[no-any-return]
