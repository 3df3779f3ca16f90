"""Weights between those of an encoder before and after training, as WiSE-FT (Wortsman et al. 2022, equation 1) has it:
part of the way often keeps most of what was gained, and of what was there before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def weights_of(encoder: Any) -> dict[str, Tensor]:
    """A copy, on the CPU, of all that an encoder consists of, by name."""
    return {name: value.detach().cpu().clone() for name, value in encoder.state_dict().items()}


def best_between(
    encoder: Any,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    weights: Sequence[float],
    measure: Callable[[], dict[str, Any]],
) -> tuple[float, list[dict[str, Any]]]:
    """(the weight at which `measure`, of the encoder as it is then, finds most "dev", and the encoder is left with; for
    each weight what it finds, and "weight"). The first of equal ones; None and no "dev" are less than any number."""
    curve = []
    for weight in weights:
        interpolate(encoder, start, end, weight)
        curve.append({"weight": weight, **measure()})
    best = max(curve, key=lambda row: -math.inf if row.get("dev") is None else row["dev"])["weight"]
    interpolate(encoder, start, end, best)
    return best, curve


def interpolate(encoder: Any, start: Mapping[str, Tensor], end: Mapping[str, Tensor], weight: float) -> None:
    """Give an encoder the weights start + weight (end - start), made in float32, or in float64 where they are.

    Args:
        start, end: weights_of encoders of one kind: the same names and shapes, and the same whole numbers.
        weight: 0 is start and 1 is end, exactly.

    Raises:
        ValueError: encoders that differ in more than weights.
    """
    check_alike(start, end)
    between: dict[str, Tensor] = {}
    for name, first in start.items():
        last, between[name] = end[name], first
        if first.is_floating_point():
            wide = first.double() if "float64" in f"{first.dtype} {last.dtype}" else first.float()
            between[name] = wide.lerp(last.to(wide.dtype), weight)
    encoder.load_state_dict(between)  # which rounds to the encoder's own dtype


def check_alike(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> None:
    """ValueError for weights of encoders that differ in more than weights."""
    for name in [*start, *(name for name in end if name not in start)]:
        first, last = (of.get(name) for of in (start, end))
        if first is None or last is None:
            raise ValueError(f"there is nothing between two encoders of which one alone has {name}")
        if first.shape != last.shape:
            shapes = f"{tuple(first.shape)} and {tuple(last.shape)}"
            raise ValueError(f"there is nothing between two encoders whose {name} is of the shapes {shapes}")
        if not first.is_floating_point() and not first.equal(last):
            raise ValueError(f"there is nothing between two encoders whose {name} differs, which is no weight")
