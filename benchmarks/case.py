"""What an op's module declares: inputs, contenders and the least work that the op could do, once for each size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raoe_kernels import backends

Call = Callable[[int], object]  # call(i) runs on the i-th copy of the inputs, i modulo COPIES

# Copies of the inputs that calls take in turn: otherwise small ones would be timed out of the innermost cache and with
# branches that have been learnt.
COPIES = 4


@dataclass(frozen=True)
class Case:
    """One size of one op.

    title       what is measured, for people: "8,192 pairs, forward + backward"
    contenders  name -> call; the first is ours, what the others are compared with
    bytes       that must be read from and written to memory at least: inputs once, results once
    flops       that the result takes at least
    missing     peers that are not here -> why
    once        a call takes so long that each contender's first is all there is
    before      what comes ahead of every call, untimed: the situation in which it runs
    """

    title: str
    contenders: Mapping[str, Call]
    bytes: int = 0
    flops: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    once: bool = False
    before: Call | None = None


def ours(function: str, device: str) -> list[str]:
    """The backends of ours to time, the one that should be first in front. Triton's interpreter is not among them."""
    available = backends(device)[function]
    names = ("native", "triton", "scan") if device == "cuda" else ("native", "scan")
    return [name for name in names if available[name] is True]
