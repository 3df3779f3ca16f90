"""Input to the backends of guided_log_probs and guided_argmax (see _contract.py), and the registration of both ops.

For guided_log_probs, `saved` holds one normaliser (2, R) per context. For each row, a normaliser holds the largest
logit z and log(sum of exp(logit - z)), or 0 and 0 if all logits are -inf. A backend without normalisers saves None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._contract import Needs, like_field, register
from .._dispatch import Op, backends, triton_missing
from .._dtypes import wide


class Problem(NamedTuple):
    """Arguments of one call: logits (R, V) for both contexts. Backends are called only if V > 0."""

    current: Tensor
    previous: Tensor
    guidance: float

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """Logits for both contexts. With guidance 1, the result depends only on `current`, which is returned twice."""
        return self.current, self.current if self.guidance == 1 else self.previous

    def reads(self, needs: Needs) -> tuple[bool, bool]:
        """Return, for each context, whether its gradient is needed and can differ from 0."""
        return needs[0], needs[1] and self.guidance != 1


def _normaliser(problem: Problem) -> Tensor:
    return problem.current.new_zeros(2, problem.current.shape[0], dtype=wide(problem.current.dtype))


def _tokens(problem: Problem) -> Tensor:
    return problem.current.new_zeros(problem.current.shape[0], dtype=torch.int64)


OP = Op("guided", ("guided_log_probs", "guided_argmax"), backends(__package__, triton=triton_missing))
log_probs = register(OP, Problem, gradients=2, result=like_field, saved=[_normaliser] * 2, scale=None)
argmax = register(OP, Problem, gradients=0, result=_tokens, name="guided_argmax", forward="argmax")
