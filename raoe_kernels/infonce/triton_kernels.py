"""info_nce_loss in Triton: matrix products through cuBLAS, and what is launched on what between them. The gradient is
made in forward, of scaled rows; backward takes it back through the rows' norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .._dtypes import wide
from ..triton_compile import Variant, signature_of
from ..triton_rows import unit_of
from .chunks import sweep
from .problem import Gradients, Problem, add_rows, own_columns
from .triton_passes import (
    IDS,
    MASK,
    NONE,
    POINTERS,
    UNIT,
    info_nce_gradients,
    info_nce_rows,
    info_nce_weights,
)

# Of what is done to each row: eight elements a thread, a load of 16 bytes in half precision.
ROWS = {"BLOCK": 1024, "num_warps": 4}
# Two sweeps over a row of logits a program. Eight elements a thread are two loads of 16 bytes in flight; with 16 warps
# few rows are open at a time, so that the second sweep finds them in a cache of 50 MB up to some 32,768 columns.
WEIGHTS = {"BLOCK": 4096, "num_warps": 16}
SHORT = {"BLOCK": 2048, "num_warps": 16}  # where a mask's address for each element, or a double, takes registers
INTERPRETED = not hasattr(info_nce_weights, "params")
# Up to this tau, exp(logit - tau) and sums of it are far from float32's ends: no maximum is looked for.
UNSHIFTED_TAU = 40.0
HALF = 2.0**15  # float16's range ends at 2^16


class _Units(NamedTuple):
    """Anchors and columns scaled by powers of two, with zeros to whole UNITs, and 1 / norm of what they are then: of
    columns, then of anchors."""

    rows: Tensor
    columns: Tensor
    inverse: Tensor


def _padded(count: int) -> int:
    return -(-count // UNIT.value) * UNIT.value


def _strides(unit: int, *matrices: Tensor) -> Iterator[int]:
    for x in matrices:
        yield from (x.stride(0) // unit, x.stride(1))


def _units(problem: Problem) -> _Units:
    a, p, n = problem.rows
    n = p if n is None else n
    width, unit = _padded(a.shape[1]), unit_of(a, p, n)
    # Symmetric losses take anchors for columns too.
    rows = a.new_empty(_padded(len(a)) if problem.symmetric else len(a), width)
    columns = a.new_empty(_padded(problem.column_count), width)
    inverse = a.new_empty(len(columns) + len(rows), dtype=wide(a.dtype))
    info_nce_rows[(len(inverse),)](
        a, p, n, rows, columns, inverse, len(a), len(p), problem.column_count, a.shape[1] // unit, width // UNIT.value,
        len(columns), *_strides(unit, a, p, n), _half(problem), GIVEN=unit, **ROWS,
    )  # fmt: skip
    return _Units(rows, columns, inverse)


def _half(problem: Problem) -> float:
    """What scaled rows are multiplied by, so that float16's use its range."""
    return HALF if problem.anchors.dtype == torch.float16 else 1.0


def _scale(problem: Problem) -> float:
    """What weights are multiplied by for the same reason. They are below 4 a direction, the norms' part included; those
    of the way back of all anchors that share a target may come together."""
    if problem.anchors.dtype != torch.float16:
        return 1.0
    largest = 1 if not problem.symmetric else 2 if problem.targets is None else 1 + len(problem.anchors)
    return HALF / 4 / 2.0 ** (largest - 1).bit_length()


def _pass(
    problem: Problem,
    units: _Units,
    stats: Tensor,
    own_weights: Tensor | None = None,
    by_column: Tensor | None = None,
    *,
    back: bool = False,
) -> Callable[[int, Tensor], Tensor | None]:
    """What `sweep` calls for a chunk. There are weights where there are own_weights to be filled; `back`, anchors'
    targets look for them."""
    n, c, anchors = len(problem.anchors), problem.column_count, len(units.columns)
    ids = (problem.anchor_ids, problem.column_ids)
    strides = (0, 0) if problem.ignored is None else problem.ignored.stride()
    column_count, places = (n, (0, anchors // UNIT.value)) if back else (c, (anchors, 0))
    if back:
        ids, strides = ids[::-1], strides[::-1]
    # What is absent is not read, and only has to have the right type.
    targets, row_ids, column_ids = (
        triton.reinterpret(stats, torch.int64) if x is None else x.contiguous()
        for x in (problem.targets, *ids)
    )  # fmt: skip
    mask = triton.reinterpret(stats if problem.ignored is None else problem.ignored, torch.uint8)
    gradient = own_weights is not None
    short = problem.ignored is not None or problem.anchors.dtype == torch.float64
    constants = (SHORT if short else WEIGHTS) | {
        "IGNORE": MASK if problem.ignored is not None else NONE if ids[0] is None else IDS,
        "SHIFTED": problem.tau > UNSHIFTED_TAU, "GRADIENT": gradient,
        "SYMMETRIC": gradient and by_column is not None, "INTERPRETED": INTERPRETED,
    }  # fmt: skip

    def weigh(first: int, logits: Tensor) -> Tensor | None:
        weights = logits
        if gradient and logits.dtype != units.rows.dtype:
            weights = torch.empty_like(logits, dtype=units.rows.dtype)
        info_nce_weights[(len(logits),)](
            logits, weights, stats if own_weights is None else own_weights, units.inverse, targets, mask, row_ids,
            column_ids, stats if by_column is None else by_column, stats, first, n, column_count,
            logits.shape[1] // UNIT.value, *places, c, 0 if by_column is None else len(by_column),
            int(problem.targets is not None), int(back), *strides, problem.tau / _half(problem) ** 2, problem.tau,
            _scale(problem), **constants,
        )  # fmt: skip
        return weights if gradient else None

    return weigh


def _by_column(problem: Problem, logsums: Tensor) -> Tensor:
    """Of each column the logarithm of its anchor's sum; where several have it for their target, such that
    exp(x - that) is the sum of theirs. As long as there are targets."""
    if problem.targets is None:
        return logsums
    targets = own_columns(problem)
    lowest = logsums.new_full((problem.column_count,), torch.inf).scatter_reduce_(0, targets, logsums, "amin")
    sums = torch.zeros_like(lowest)
    add_rows(sums, targets, (lowest[targets] - logsums).exp())
    return lowest - sums.log()


def forward(problem: Problem, needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss; and for backward the products that make the gradients, the weight of each anchor's own positive, and
    the loss again."""
    beyond = problem.beyond_triton()
    if beyond:
        raise RuntimeError(f"backend 'triton' cannot run info_nce_loss with {beyond}; use scan")
    n = len(problem.anchors)
    by_column = own_weights = wanted = None
    with torch.cuda.device_of(problem.anchors):
        units = _units(problem)
        rows = units.rows[:n] if problem.symmetric else units.rows
        stats = units.inverse.new_empty(4 if problem.symmetric else 1, n)
        if problem.symmetric:
            own = units.columns[:n] if problem.targets is None else units.columns[own_columns(problem)]
            sweep(own, units.rows, _pass(problem, units, stats, back=True))
            by_column = _by_column(problem, stats[2])
        if any(needs):
            own_weights = units.inverse.new_empty(n)
        start = 0 if needs[1] else len(problem.positives)
        if needs[1] or needs[2]:
            wanted = slice(start, None if needs[2] or problem.negatives is None else len(problem.positives))
        weigh = _pass(problem, units, stats, own_weights, by_column)
        by_rows, by_columns = sweep(rows, units.columns, weigh, needs[0], wanted)
    if problem.targets is not None and own_weights is not None and by_columns is not None and len(by_columns):
        # Several may be one column's; where all have their own, backward adds them.
        places = own_columns(problem) - start
        inside = (places >= 0) & (places < len(by_columns))
        add_rows(by_columns, places.clamp(0, len(by_columns) - 1), rows * (own_weights * inside)[:, None])
    loss = (stats[:2] if problem.symmetric else stats).mean()
    return loss, (by_rows, by_columns, own_weights, loss)


def backward(
    problem: Problem, saved: tuple, upstream: Tensor, needs: tuple[bool, ...], dtype: torch.dtype
) -> Gradients:
    by_rows, by_columns, own_weights, loss = saved
    first, second, third = (
        x.new_empty(x.shape, dtype=dtype) if need and x is not None else None
        for x, need in zip(problem.rows, needs[:3], strict=True)
    )
    grads = [x for x in (first, second, third) if x is not None]
    sums = [x for x in (by_rows, by_columns) if x is not None]
    programs, width = sum(map(len, grads)), problem.anchors.shape[1]
    if programs and width:
        a, p, n = (problem.positives if x is None else x for x in problem.rows)
        unit = unit_of(a, p, n)
        count = len(a) * (2 if problem.symmetric else 1)
        targets = triton.reinterpret(loss, torch.int64) if problem.targets is None else problem.targets.contiguous()
        with torch.cuda.device_of(a):
            info_nce_gradients[(programs,)](
                a, p, n, sums[0], sums[-1], own_weights, targets,
                *(grads[0] if x is None else x for x in (first, second, third)), loss, upstream,
                0 if first is None else len(a), 0 if needs[1] else len(p), len(a), len(p), problem.column_count,
                int(problem.targets is not None), width // unit, sums[0].shape[1] // UNIT.value,
                *_strides(unit, a, p, n), problem.tau / (count * _scale(problem) * _half(problem)), _half(problem),
                GIVEN=unit, INTERPRETED=INTERPRETED, **ROWS,
            )  # fmt: skip
    return first, second, third, None, None


def variants() -> Iterator[Variant]:
    """Every compilation that calls can cause, for triton_compile."""
    for name in ("fp16", "bf16", "fp32", "fp64"):
        exact = "fp64" if name == "fp64" else "fp32"
        pointers = dict.fromkeys(POINTERS, f"*{name}")
        pointers |= dict.fromkeys(("inverse", "logits", "by_column", "stats", "by_rows", "by_columns"), f"*{exact}")
        pointers |= dict.fromkeys(("own_weights", "loss", "upstream"), f"*{exact}") | {"mask": "*u8"}
        pointers |= dict.fromkeys(("targets", "row_ids", "column_ids"), "*i64")
        for unit, which in ((16, "aligned"), (1, "any")):
            constants = {"BLOCK": ROWS["BLOCK"], "GIVEN": unit}
            yield Variant(f"info_nce_rows {name} {which}", info_nce_rows, signature_of(info_nce_rows, **pointers),
                          constants, ROWS["num_warps"])  # fmt: skip
            for grad in sorted({name, exact}):  # wide where torch.compile asks
                grads = dict.fromkeys(("grad_anchors", "grad_positives", "grad_negatives"), f"*{grad}")
                signature = signature_of(info_nce_gradients, **(pointers | grads))
                yield Variant(f"info_nce_gradients {name} to {grad} {which}", info_nce_gradients, signature,
                              constants | {"INTERPRETED": False}, ROWS["num_warps"])  # fmt: skip
        signature = signature_of(info_nce_weights, **pointers)
        kinds = ["gradient", "symmetric"] + ["loss"] * (name == exact)  # weights of a loss alone are the logits
        for ignore, kind, shifted in product((NONE, MASK, IDS), kinds, (False, True)):
            table = SHORT if ignore == MASK or name == "fp64" else WEIGHTS
            which = f"{('all', 'mask', 'ids')[ignore]} {kind} {'shifted' if shifted else 'small'}"
            constants = {"BLOCK": table["BLOCK"], "IGNORE": ignore, "SHIFTED": shifted, "GRADIENT": kind != "loss"}
            constants |= {"SYMMETRIC": kind == "symmetric", "INTERPRETED": False}
            yield Variant(f"info_nce_weights {name} {which}", info_nce_weights, signature, constants,
                          table["num_warps"])  # fmt: skip
