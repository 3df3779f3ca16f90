"""The declaration of a benchmark: for each size of an op its inputs, contenders and the minimum work of the op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raoe_kernels import backends

Call = Callable[[int], object]  # call(i) runs on the i-th copy of the inputs, i modulo COPIES

# Calls use this many copies of the inputs in turn. With one copy, small inputs would stay in the innermost cache, and
# the branch predictor would know the data.
COPIES = 4


@dataclass(frozen=True)
class Case:
    """One size of one op.

    title       description of the measurement, such as "8,192 pairs, forward + backward"
    contenders  name -> call; the first is ours, and the others are compared with it
    bytes       minimum number of bytes to read and write: inputs once, results once
    flops       minimum number of FLOPs
    missing     name of an unavailable contender -> reason
    once        whether calls take so long that only the first call of each contender is timed
    before      untimed call before every timed one, to reproduce the situation in which an op runs
    rounds      maximum number of rounds of timed calls
    details     function from a contender's name to more entries of its row; "failed": the contender is wrong
    """

    title: str
    contenders: Mapping[str, Call]
    bytes: int = 0
    flops: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    once: bool = False
    before: Call | None = None
    rounds: int = 15
    details: Callable[[str], Mapping[str, Any]] | None = None


def ours(function: str, device: str) -> list[str]:
    """Our backends to time, the preferred one first, without Triton's interpreter."""
    available = backends(device)[function]
    names = ("native", "triton", "scan") if device == "cuda" else ("native", "scan")
    return [name for name in names if available[name] is True]
